"""Packing into rows as an input mode: the sampler, and a run that trains on it and resumes."""

import itertools
import json

import numpy as np
import pytest

from bert_unpad._balancer import WorkModel
from bert_unpad.data import PackedSampler
from bert_unpad.data.sampling.balanced_sampler import efficiency
from bert_unpad.data.sampling.histogram import sample_lengths
from tests.support.pretrain_runs import log_lines


def samplers(lengths, ranks, rows, **options):
    return [PackedSampler(lengths, ranks, rank, rows, seed=7, **options) for rank in range(ranks)]


@pytest.mark.parametrize("method", ["best_fit", "shortest_first"])
@pytest.mark.parametrize("limit", [None, 3])
def test_every_example_once_an_epoch_in_rows_that_fit(method, limit):
    lengths = sample_lengths(3000, seed=1)
    ranks, rows = 3, 4
    every = samplers(lengths, ranks, rows, method=method, max_sequences=limit)
    assert every[0].fill == lengths.sum(dtype=int) / (every[0].rows * 512)
    assert every[0].fill > (0.98 if limit is None else 0.7)
    orders = []
    for _ in range(2):
        met, total = [], 0
        for parts in zip(*every, strict=True):
            in_step = every[0].rows_in_step
            total += in_step
            tokens = [int(lengths[part].sum(dtype=int)) for part in parts]
            held = [len(range(rank, in_step, ranks)) for rank in range(ranks)]
            assert all(t <= h * 512 for t, h in zip(tokens, held, strict=True))
            assert all(len(p) <= h * (limit or 512) for p, h in zip(parts, held, strict=True))
            assert all((np.diff(lengths[part].astype(int)) <= 0).all() for part in parts)
            met += [i for part in parts for i in part.tolist()]
        assert sorted(met) == list(range(3000))
        assert total == every[0].rows
        orders.append(met)
    assert orders[0] != orders[1]
    assert every[0].epoch == 2


def test_steps_are_counted_and_the_last_may_lack_rows():
    lengths = np.full(10, 60)  # one to a row of 100
    every = samplers(lengths, 2, 3, row_tokens=100)
    assert (every[0].rows, every[0].steps_per_epoch, every[0].fill) == (10, 2, 0.6)
    sizes = [[len(part) for part in parts] for parts in zip(*every, strict=True)]
    assert sizes == [[3, 3], [2, 2]]
    few = samplers(np.full(3, 60), 4, 2, row_tokens=100)
    assert [[len(p) for p in parts] for parts in zip(*few, strict=True)] == [[1, 1, 1, 0]]


def test_straggler_efficiency_is_that_of_the_ranks():
    lengths = sample_lengths(2000, seed=2)
    work = WorkModel(3.0, 0.01)
    every = samplers(lengths, 4, 2, work=work)
    for parts in itertools.islice(zip(*every, strict=True), 5):
        loads = [[sum(work(float(s)) for s in lengths[part]) for part in parts]]
        assert every[2].straggler_efficiency() == pytest.approx(efficiency(np.array(loads))[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_resumes_on_any_number_of_ranks(ranks):
    lengths = sample_lengths(1500, seed=3)
    first = samplers(lengths, 2, 4)
    steps = zip(*first, strict=True)
    met = [i for _ in range(9) for part in next(steps) for i in part.tolist()]
    state = json.loads(json.dumps(first[1].state_dict()))
    second = samplers(lengths, ranks, 4)
    for sampler in second:
        sampler.load_state_dict(state)
    assert second[0].step == 9
    rest = [[part.tolist() for part in parts] for parts in zip(*second, strict=True)]
    assert sorted(met + [i for parts in rest for part in parts for i in part]) == list(range(1500))
    if ranks == 2:
        assert rest == [[part.tolist() for part in parts] for parts in steps]


def test_states_and_arguments_are_checked():
    lengths = sample_lengths(300, seed=4)
    sampler = PackedSampler(lengths, 1, 0, 2)
    next(iter(sampler))
    state = sampler.state_dict()
    for change, message in (
        ({"version": 2}, "expected version 1"),
        ({"num_examples": 3}, "saved with other data"),
        ({"rows_done": 10**6}, "a number is out of range"),
        ({"packing": {}}, "saved within an epoch of rows made by"),
        ({"seed": None}, "not a state of PackedSampler"),
        ({"rows_done": float("inf")}, "not a state of PackedSampler"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedSampler(lengths, 1, 0, 2).load_state_dict(state | change)
    old = iter(sampler)
    iter(sampler)
    with pytest.raises(RuntimeError, match="moved, or iterated again"):
        next(old)
    for arguments, name in (
        (([], 1, 0, 1), "lengths"),
        ((lengths, 0, 0, 1), "num_replicas"),
        ((lengths, 2, 2, 1), "rank"),
        ((lengths, 1, 0, 0), "batch_size"),
        ((lengths, 1, 0, 1, -1), "seed"),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            PackedSampler(*arguments)
    with pytest.raises(ValueError, match="lengths: expected 1 to 100"):
        PackedSampler(lengths, 1, 0, 1, row_tokens=100)


def test_a_run_trains_on_rows_and_resumes(tmp_path):
    pytest.importorskip("jsonargparse")
    import yaml

    from bert_unpad.pretrain import main
    from bert_unpad.pretrain.output.metrics import read_json_lines

    text = "\n\n".join(f"One w{i} two. " * (1 + i % 5) + f"Ends w{i}." for i in range(120))
    (tmp_path / "corpus.txt").write_text(text)
    settings = {
        "device": "cpu",
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"intermediate_size": 32, "max_position_embeddings": 32},
        "data": {"source": str(tmp_path / "corpus.txt"), "cache_dir": str(tmp_path / "cache")}
        | {"max_seq_length": 32, "vocab_size": 80},
        "batching": {"strategy": "packed", "global_batch_size": 8},
        "schedule": {"epochs": 1, "power": 0, "warmup_steps": 0},
        "checkpoint": {"every": 0},
        "evaluation": {"examples": 0},
        "logging": {"every": 1, "progress": "none", "examples": True},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    run = ["--config", str(tmp_path / "run.yaml")]
    whole, parted = (f"--run_dir={tmp_path / name}" for name in ("whole", "parted"))
    assert main([*run, whole]) == 0
    assert main([*run, parted, "--schedule.epochs=null", "--schedule.total_steps=3"]) == 0
    assert main([*run, parted]) == 0
    lines = [log_lines(tmp_path / name) for name in ("whole", "parted")]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    last = lines[0][-1]
    unpacked = last["tokens"] / (last["sequences"] * 32)
    assert np.mean([line["fill"] for line in lines[0]]) > 1.2 * unpacked
    assert all(line["fill"] <= 1 for line in lines[0])
    used = read_json_lines(tmp_path / "parted" / "examples.rank0.jsonl")
    met = [i for line in used for i in line["examples"]]
    assert sorted(met) == list(range(len(met)))
    assert lines[0][-1]["sequences"] == len(met) > 8 * len(lines[0])
