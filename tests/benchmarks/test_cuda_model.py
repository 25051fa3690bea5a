"""Predictions by the model of an SM: the page is that of the record, and the record that of today's
kernels."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import cuda_model
from benchmarks.lib import cuda_model_cases as cases
from benchmarks.lib import cuda_model_table, cuda_sass
from benchmarks.lib import flash_attention_build as flash_build
from gpu_model import build
from gpu_model.sm import attention, attention_wgmma
from gpu_model.sm.architectures import H100
from gpu_model.sm.kernel import Model
from tests.support.paths import ROOT

RECORD = ROOT / "benchmarks" / "results" / "model" / "attention.json"
PAGE = ROOT / "docs" / "development" / "cuda-model.md"


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def kernels():
    """This build's, for Hopper."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    if not list((ROOT / "bert_unpad").glob("_C_cuda*.so")):
        pytest.skip("built without CUDA")
    try:
        cuda_sass.find_tools()
    except SystemExit as error:
        pytest.skip(str(error))
    kernels = cuda_model.own_kernels("sm_90a")
    if attention.kernel_name("attention_forward_kernel", 64, 2, True, False) not in kernels:
        pytest.skip("not built for sm_90a")
    return kernels


def test_the_page_is_that_of_the_record(record):
    assert PAGE.read_text() == cuda_model_table.render(record)


def test_constants_are_those_of_the_record(record):
    assert record["constants"] == cases.constants()


def test_published_figures_are_met(record):
    """FlashAttention-2's own machine code, with the recorded constants."""
    errors = [row["predicted"] / row["value"] - 1 for row in record["published"]]
    assert len(errors) == len(cases.PUBLISHED)
    assert max(map(abs, errors)) < 0.1
    assert abs(np.mean(errors)) < 0.05


def test_a_range_has_the_constants_that_its_ends_are_of(record):
    """Slow ends are slower; an H200 is an H100 with more memory bandwidth; an A100 has none."""
    for row in record["passes"]:
        for name in ("forward", "backward"):
            found = row[f"{name}_ranges"]
            if row["architecture"] == "A100":
                assert found == {}
                continue
            for gpu in ("H100", "H200"):
                slow, fast = found[gpu]
                assert 1.1 * fast < slow < 1.4 * fast
            assert all(b < a for a, b in zip(found["H100"], found["H200"], strict=True))


def test_peers_that_are_not_in_the_model_stand_beside_it(record):
    """In the order of arXiv:2407.08608's figures: FlashAttention-3 and cuDNN beat version 2."""
    for row in record["published"]:
        assert row["value"] < min(row["cudnn"], row["flash_3"])
        slow, fast = row["ours_range"]
        text = f"| {row['cudnn']} | {row['flash_3']} | {{}} | {slow:.0f} to {fast:.0f} |"
        loop = "-"
        if row["direction"] == "forward":
            loop = "{:.0f} to {:.0f}".format(*row["loop_range"])
        assert text.format(loop) in PAGE.read_text()


def test_a_kernel_that_nothing_was_fitted_to_comes_out_as_published(record):
    """arXiv:2407.08608's figures of Triton; the kernel is compiled by a release of that year."""
    rows = [row for row in record["published"] if "triton_predicted" in row]
    assert [row["triton"] for row in rows] == [x.triton for x in cases.PUBLISHED if x.triton]
    for row in rows:
        assert row["triton_predicted"] == pytest.approx(row["triton"], rel=0.1)


def test_the_record_is_of_these_kernels(record, kernels):
    """Where the same nvcc built them: another one makes other machine code."""
    if cuda_model.nvcc_version() != record["nvcc"]:
        pytest.skip(f"the record is of {record['nvcc']}")
    batch = cases.batches()["24 x 512"]
    model = Model(H100)
    for dropout_p in (0.0, 0.1):
        (row,) = (
            r
            for r in record["passes"]
            if (r["architecture"], r["batch"], r["contender"], r["dropout_p"])
            == ("H100", "24 x 512", "bert_unpad", dropout_p)
        )
        forward = attention.forward(kernels, batch, dropout_p)
        backward = attention.backward(kernels, batch, dropout_p, H100)
        assert cases.seconds(model, forward)[0] == pytest.approx(row["forward_seconds"], rel=0.01)
        assert cases.seconds(model, backward)[0] == pytest.approx(row["backward_seconds"], rel=0.01)


@pytest.mark.parametrize("length", [1, 17, 100, 300])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_traces_have_the_products_of_the_lengths(kernels, length, dropout_p):
    """Every tensor-core product of every warp: rows by warps and keys by 32 (forward) and, in the
    backward pass, keys by warps of 32 and queries by steps of 16, for dQ too."""
    batch = cases.batch_of([length] * 200)
    up, keys = -(-length // 16) * 16, -(-length // 32) * 32

    def products(stages):
        launch = stages[0].launches[0]
        code = launch.kernel.function.instructions
        return [
            sum(code[i].name == "HMMA" for i in warp.code.tolist())
            for block in range(launch.grid[0] // (200 * 16))
            for warp in launch.walk(block)
        ]

    # 2,048 multiply-adds each.
    counts = products(attention.forward(kernels, batch, dropout_p))
    rows = 32 if length > 64 else 16
    warps = -(-length // rows)
    assert sum(counts) == warps * rows * keys * 64 * 2 // 2048
    counts = products(attention.backward(kernels, batch, dropout_p, H100))
    rows = keys
    assert sum(counts) == (keys * up * 4 + rows * up) * 64 // 2048


@pytest.mark.parametrize("length", [1, 64, 100, 300])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_traces_of_kernels_with_wgmma_have_the_products_of_the_lengths(kernels, length, dropout_p):
    """Of each warp: 8 instructions for 64 queries and 64 keys forward, 16 and its share of dQ
    backward, where a warpgroup goes along with the last one's keys; by two kernels 12 and 16. Twice
    as many for 128 columns."""
    batch, few = cases.batch_of([length] * 200), cases.batch_of([length], heads=2)
    up = -(-length // 64)

    def products(stage, batch=batch):
        (launch,) = stage.launches
        code = launch.kernel.function.instructions
        return sum(
            code[i].name == "HGMMA"
            for block in range(launch.grid[0] // (len(batch.lengths) * batch.heads))
            for warp in launch.walk(block)
            for i in warp.code.tolist()
        )

    (forward,) = attention_wgmma.forward(kernels, batch, dropout_p)
    assert products(forward) == 4 * 8 * up * up
    groups = attention_wgmma.backward_groups(length)
    passes = -(-up // groups)
    share = 4 * groups  # of dQ: all keys of the pass, 64 / groups columns
    expected = 4 * groups * passes * up * (16 + share)
    (backward,) = attention_wgmma.backward(kernels, batch, dropout_p, H100)
    assert products(backward) == expected
    for head_dim, batch in ((64, few), (128, replace(few, head_dim=128))):
        queries, keys = attention_wgmma.backward(kernels, batch, dropout_p, H100)
        assert products(queries, batch) == head_dim // 64 * 4 * 12 * up * up
        assert products(keys, batch) == head_dim // 64 * 4 * 16 * up * up
    (forward,) = attention_wgmma.forward(kernels, batch, dropout_p)
    assert products(forward, batch) == 2 * 4 * 8 * up * up


def test_the_mix_has_the_lengths_of_the_histogram():
    lengths = np.array(cases.wikipedia_mix(1000))
    assert (lengths.min() >= 1, lengths.max()) == (True, 512)
    assert lengths.mean() == pytest.approx(255.83, abs=0.5)
    assert (lengths == 512).mean() == pytest.approx(0.234, abs=0.01)
    assert cases.wikipedia_mix(48) == cases.wikipedia_mix(48)
    assert cases.batches()["48 of Wikipedia"].runs[0][2] == 512


def test_units_of_flash_attention():
    stems = [unit.stem for unit in flash_build.UNITS]
    assert len(set(stems)) == len(stems) == 6
    assert flash_build.Unit("FORWARD", True, False).defines == [
        *("-DBU_FORWARD", "-DBU_DROPOUT=true", "-DBU_EVEN=false")
    ]


def test_the_page_can_be_written_again(record, tmp_path, monkeypatch, capsys):
    table = tmp_path / "page.md"
    arguments = ["cuda_model", "--from", str(RECORD), "--table", str(table)]
    monkeypatch.setattr("sys.argv", arguments)
    cuda_model.main()
    assert table.read_text() == PAGE.read_text()


def test_without_flash_attention_there_is_no_ratio(record):
    rows = [row for row in record["passes"] if row["contender"] == "bert_unpad"]
    page = cuda_model_table.render(
        record | {"passes": rows, "flash_attention": None, "published": []}
    )
    assert "Published figures" not in page
    assert page.count("| - | - |") == len(rows)


def test_what_keeps_blocks_busy(record):
    text = cuda_model_table.explain(record)
    assert text.count(" cycles a block") == len(record["blocks"])
    products = text.count(" HMMA") + text.count(" HGMMA")
    assert products == sum(row["trips"] > 0 for row in record["blocks"])
