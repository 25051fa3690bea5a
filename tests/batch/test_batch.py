"""VarlenBatch, unpad and pad, PackedInputs: every mask against plain indexing."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from bert_unpad.batch import PackedInputs, VarlenBatch, pad, unpad
from bert_unpad.batch.rows import gather_rows, scatter_rows
from bert_unpad.ops import varlen_attention
from tests.support.seeds import derived

MASKS = {
    "right padding": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]],
    "left padding": [[0, 0, 1, 1], [0, 1, 1, 1]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 1]],
    "empty rows": [[0, 0, 0], [1, 1, 0], [0, 0, 0]],
    "nothing but padding": [[0, 0], [0, 0]],
    "no columns": [[], []],
}


def mask_of(name: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    rows = MASKS[name]
    return torch.tensor(rows, dtype=dtype).view(len(rows), len(rows[0]))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32])
def test_from_mask_describes_the_ones(name, dtype):
    mask = mask_of(name, dtype)
    batch = VarlenBatch.from_mask(mask)
    rows, columns = mask.nonzero(as_tuple=True)
    lengths = mask.sum(1).long()
    assert (batch.batch_size, batch.seqlen) == tuple(mask.shape)
    assert batch.lengths.tolist() == lengths.tolist()
    assert batch.cu_seqlens.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert batch.cu_seqlens_host.tolist() == batch.cu_seqlens.tolist()
    assert (batch.lengths.dtype, batch.cu_seqlens.dtype) == (torch.int32, torch.int32)
    assert batch.max_seqlen == lengths.max()
    assert batch.total == len(rows)
    assert batch.indices.tolist() == (rows * mask.shape[1] + columns).tolist()
    assert batch.position_ids.tolist() == columns.tolist()
    assert batch.fill == (batch.total / mask.numel() if mask.numel() else 1.0)


def test_from_mask_of_no_sequences():
    batch = VarlenBatch.from_mask(torch.zeros(0, 5, dtype=torch.bool))
    assert (batch.batch_size, batch.total, batch.max_seqlen, batch.seqlen) == (0, 0, 0, 5)
    assert batch.cu_seqlens.tolist() == [0]
    assert pad(torch.zeros(0, 7), batch).shape == (0, 5, 7)


@pytest.mark.parametrize("container", [list, np.array, torch.tensor, tuple])
def test_from_lengths_equals_a_right_padded_mask(container):
    lengths = [5, 0, 3, 1]
    batch = VarlenBatch.from_lengths(container(lengths))
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    expected = VarlenBatch.from_mask(mask)
    for name in ("lengths", "cu_seqlens", "cu_seqlens_host", "indices", "position_ids"):
        got, want = getattr(batch, name), getattr(expected, name)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert (batch.max_seqlen, batch.total, batch.seqlen) == (5, 9, 5)


def test_from_lengths_takes_a_device():
    batch = VarlenBatch.from_lengths([2, 3], device="meta")
    for tensor in (batch.cu_seqlens, batch.indices, batch.position_ids):
        assert tensor.device.type == "meta"
    assert batch.device.type == "meta"
    assert batch.cu_seqlens_host.tolist() == [0, 2, 5]


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_from_lengths_without_tokens(lengths):
    batch = VarlenBatch.from_lengths(lengths)
    assert (batch.batch_size, batch.total, batch.max_seqlen) == (len(lengths), 0, 0)
    assert batch.cu_seqlens.tolist() == [0] * (len(lengths) + 1)
    assert batch.fill == 1.0


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([[1, 2]], ValueError, "lengths: expected shape"),
        ([1, -2], ValueError, "lengths: expected 0 or more, got -2"),
        ([1.5, 2.0], TypeError, "lengths: expected integers"),
        (torch.tensor([True]), TypeError, "lengths: expected integers"),
    ],
)
def test_from_lengths_refuses(lengths, error, message):
    with pytest.raises(error, match=message):
        VarlenBatch.from_lengths(lengths)


@pytest.mark.parametrize("container", [list, np.array, torch.tensor])
@pytest.mark.parametrize("lengths", [[], [0], [2, 0, 5, 2]])
def test_from_cu_seqlens_equals_from_lengths(container, lengths):
    batch = VarlenBatch.from_cu_seqlens(container([0, *np.cumsum(lengths, dtype=np.int64)]))
    expected = VarlenBatch.from_lengths(lengths)
    for name in ("lengths", "cu_seqlens", "cu_seqlens_host", "indices", "position_ids", "order"):
        got, want = getattr(batch, name), getattr(expected, name)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert (batch.max_seqlen, batch.total) == (expected.max_seqlen, expected.total)


def test_from_cu_seqlens_takes_unsigned_numbers_and_a_device():
    batch = VarlenBatch.from_cu_seqlens(np.array([0, 2, 5], np.uint8), device="meta")
    assert batch.lengths.tolist() == [2, 3]
    assert batch.device.type == "meta"


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        ([[0, 2]], ValueError, r"cu_seqlens: expected shape \[batch \+ 1\], got \[1, 2\]"),
        ([], ValueError, "cu_seqlens must start with 0, got no number"),
        ([3, 2], ValueError, "must start with 0, got 3; VarlenBatch.from_lengths takes lengths"),
        ([0, 3, 2], ValueError, "cu_seqlens must not decrease, got 2 after 3"),
        (np.array([0, 3, 2], np.uint8), ValueError, "must not decrease, got 2 after 3"),
        ([0, 1.5], TypeError, "cu_seqlens: expected integers, got float64"),
        ([0, 2**31], ValueError, r"cu_seqlens: expected at most 2\*\*31 - 1 tokens in a batch"),
    ],
)
def test_from_cu_seqlens_refuses(cu_seqlens, error, message):
    with pytest.raises(error, match=message):
        VarlenBatch.from_cu_seqlens(cu_seqlens)


@pytest.mark.parametrize("cu_seqlens", [[1, 3], [0, 3, 2]])
def test_operators_refuse_cu_seqlens_in_the_same_words(cu_seqlens):
    with pytest.raises(ValueError) as refused:
        VarlenBatch.from_cu_seqlens(cu_seqlens)
    words, _, _ = str(refused.value).partition(";")
    qkv = torch.zeros(3, 3, 1, 8)
    with pytest.raises(RuntimeError, match=f"varlen_attention: {words}"):
        varlen_attention(qkv, torch.tensor(cu_seqlens, dtype=torch.int32), 3)


TOO_MANY = """
import resource
import numpy as np
import torch
from bert_unpad.batch import VarlenBatch
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
lists = [2**62] * 4, [2**31], [2**31 - 1, 1], [2**63 - 1] * 2
for lengths in (*lists, torch.tensor([2**62] * 4), np.array([2**64 - 1], np.uint64)):
    try:
        VarlenBatch.from_lengths(lengths)
    except ValueError as error:
        assert "lengths: expected at most 2**31 - 1 tokens in a batch, got " in str(error), error
    else:
        raise AssertionError(lengths)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limit on memory")
def test_from_lengths_refuses_too_many_tokens_before_it_asks_for_memory():
    subprocess.run([sys.executable, "-c", TOO_MANY], check=True)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([[1, 0]], TypeError, "mask: expected a torch.Tensor"),
        (torch.ones(3), ValueError, "mask: expected shape"),
        (torch.ones(1, 1, 2, 2), ValueError, "mask: expected shape"),
        (torch.tensor([[1, 2]]), ValueError, "only 0"),
        (torch.tensor([[0.0, -1e4]]), ValueError, "additive mask"),
        (torch.tensor([[1.0, float("nan")]]), ValueError, "only 0"),
        (torch.ones(1, 2, dtype=torch.complex64), TypeError, "complex64"),
    ],
)
def test_from_mask_refuses(mask, error, message):
    with pytest.raises(error, match=message):
        VarlenBatch.from_mask(mask)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tail", [(), (3,), (2, 3)])
def test_unpad_and_pad_are_indexing_and_each_others_gradient(name, tail):
    generator = torch.Generator().manual_seed(derived(0))
    mask = mask_of(name, torch.bool)
    batch = VarlenBatch.from_mask(mask)
    x = torch.randn(*mask.shape, *tail, generator=generator, requires_grad=True)
    packed = unpad(x, batch)
    assert torch.equal(packed, x[mask])
    padded = pad(packed, batch, value=-2.0)
    assert torch.equal(padded[mask], x[mask])
    assert (padded[~mask] == -2.0).all()
    weight = torch.randn(padded.shape, generator=generator)
    (grad,) = torch.autograd.grad((padded * weight).sum(), x)
    kept = mask.view(*mask.shape, *[1] * len(tail))
    assert torch.equal(grad, weight * kept)


def test_rows_can_be_derived_twice():
    torch.manual_seed(derived(0))
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 3])
    torch.autograd.gradgradcheck(lambda x: gather_rows(x, indices) ** 2, x)
    torch.autograd.gradgradcheck(lambda x: scatter_rows(x[:3], indices, 6) ** 2, x)
    scattered = scatter_rows(x[:3], indices, 6, -1.0)
    assert torch.equal(scattered[indices], x[:3])
    assert (scattered[[1, 2, 5]] == -1).all()


def test_unpad_takes_rows_that_are_not_contiguous_and_integers():
    mask = mask_of("holes", torch.bool)
    batch = VarlenBatch.from_mask(mask)
    x = torch.arange(2 * 4 * 3).view(3, 4, 2).permute(2, 1, 0)
    assert torch.equal(unpad(x, batch), x[mask])


def test_unpad_and_pad_refuse_other_shapes():
    batch = VarlenBatch.from_mask(mask_of("holes"))
    with pytest.raises(ValueError, match=r"x: expected shape \[2, 4\]"):
        unpad(torch.zeros(4, 2, 8), batch)
    with pytest.raises(ValueError, match=r"x: expected shape \[5, ...\]"):
        pad(torch.zeros(4, 8), batch)


def test_compiles_to_one_graph_for_any_lengths():
    def twice(x, batch):
        return pad(unpad(x, batch) * 2, batch, value=1.0)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twice, fullgraph=True, backend=counter, dynamic=True)
    for lengths in ([5, 2, 3], [7, 1, 4], [6, 6, 2], [9, 2, 3]):
        mask = torch.arange(9) < torch.tensor(lengths)[:, None]
        batch = VarlenBatch.from_mask(mask)
        x = torch.randn(*mask.shape, 4, requires_grad=True)
        out = compiled(x, batch)
        assert torch.equal(out, twice(x, batch))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad, 2.0 * mask[..., None].expand_as(x))
    assert counter.frame_count <= 2  # the second one lets the token count vary


def test_groups_cover_every_sequence_longest_first():
    generator = np.random.default_rng(derived(0))
    lengths = generator.integers(1, 512, 40)
    batch = VarlenBatch.from_lengths(lengths)
    assert 1 <= len(batch.groups) <= 4
    assert sorted(b for group in batch.groups for b in group.sequences) == list(range(40))
    longest = [group.max_seqlen for group in batch.groups]
    assert longest == sorted(longest, reverse=True)
    for group in batch.groups:
        assert group.max_seqlen == lengths[list(group.sequences)].max()
    assert batch.to("cpu").groups is batch.groups


@pytest.mark.parametrize("lengths", [[3, 500, 3, 0, 128, 500, 64, 1], [7], [0, 0], []])
def test_order_and_group_sizes_describe_the_groups(lengths):
    batch = VarlenBatch.from_lengths(lengths)
    assert batch.order.dtype == batch.group_sizes.dtype == torch.int32
    assert batch.order.tolist() == [b for group in batch.groups for b in group.sequences]
    assert batch.order.tolist() == sorted(range(len(lengths)), key=lambda b: -lengths[b])
    starts = batch.cu_seqlens.tolist()
    table = [[b, starts[b], lengths[b], 0] for b in batch.order.tolist()]
    assert torch.equal(batch.order_table, torch.tensor(table, dtype=torch.int32).flatten())
    wanted = [[len(g.sequences), g.max_seqlen, g.max_seqlen] for g in batch.groups]
    assert batch.group_sizes.tolist() == (wanted or [[0, 0, 0]])


def test_order_moves_with_the_data_and_group_sizes_stay_on_the_host():
    batch = VarlenBatch.from_lengths([2, 5])
    sizes = batch.group_sizes
    moved = batch.to("meta")
    assert moved.order.device.type == moved.order_table.device.type == "meta"
    assert moved.group_sizes is sizes


def packed_example() -> PackedInputs:
    batch = VarlenBatch.from_lengths([4, 0, 3, 1])
    return PackedInputs.build(
        batch=batch,
        input_ids=torch.arange(8),
        token_type_ids=torch.zeros(8, dtype=torch.int64),
        masked_positions=torch.tensor([1, 3, 6]),
        masked_labels=torch.tensor([5, 6, 7]),
        next_sentence_labels=torch.tensor([0, 1, 1, -100]),
    )


def test_query_rows_are_first_and_masked_tokens():
    rows = packed_example().query_rows
    assert rows.positions.tolist() == [0, 1, 3, 4, 6, 7]
    assert rows.cu_seqlens.tolist() == [0, 3, 3, 5, 6]
    assert rows.cu_seqlens.dtype == torch.int32
    assert rows.max_seqlen == 3
    assert rows.positions[rows.mlm_rows].tolist() == [1, 3, 6]
    assert rows.positions[rows.cls_rows].tolist() == rows.cls_positions.tolist() == [0, 4, 7]
    assert rows.cls_sequences.tolist() == [0, 2, 3]
    assert rows.cls_labels.tolist() == [0, 1, -100]


def test_query_rows_hold_a_masked_first_token_once():
    inputs = PackedInputs.build(
        VarlenBatch.from_lengths([2, 2]),
        torch.zeros(4, dtype=torch.int64),
        masked_positions=torch.tensor([2, 3]),
        masked_labels=torch.tensor([1, 1]),
    )
    assert inputs.query_rows.positions.tolist() == [0, 2, 3]
    assert inputs.query_rows.mlm_rows.tolist() == [1, 2]
    assert inputs.query_rows.cls_rows.tolist() == [0, 1]


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_packed_inputs_without_tokens(lengths):
    inputs = PackedInputs.build(
        VarlenBatch.from_lengths(lengths), torch.empty(0, dtype=torch.int64)
    )
    rows = inputs.query_rows
    assert inputs.num_masked == rows.positions.numel() == rows.cls_rows.numel() == 0
    assert rows.cu_seqlens.tolist() == [0] * (len(lengths) + 1)
    assert inputs.next_sentence_labels.tolist() == [-100] * len(lengths)


def test_packed_inputs_survive_pickling_and_moving():
    inputs = packed_example()
    for other in (pickle.loads(pickle.dumps(inputs)), inputs.to("cpu")):
        assert torch.equal(other.input_ids, inputs.input_ids)
        assert torch.equal(other.query_rows.positions, inputs.query_rows.positions)
        assert torch.equal(other.batch.cu_seqlens, inputs.batch.cu_seqlens)
        assert other.batch.max_seqlen == 4
    moved = inputs.to("meta")
    assert moved.device.type == moved.batch.device.type == "meta"
    assert moved.query_rows.positions.device.type == "meta"
    assert moved.batch.lengths.device.type == moved.batch.cu_seqlens_host.device.type == "cpu"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": torch.arange(7)}, ValueError, r"input_ids: expected shape \[8\]"),
        ({"input_ids": torch.zeros(8)}, TypeError, "input_ids: expected int64"),
        ({"masked_labels": torch.tensor([1])}, ValueError, "masked_labels: expected shape"),
        ({"masked_labels": None}, ValueError, "expected both or none"),
        (
            {"masked_positions": torch.tensor([1, 3, 8])},
            ValueError,
            "got 1 .. 8",
        ),
        ({"masked_positions": torch.tensor([1, 3, 3])}, ValueError, "strictly ascending"),
        ({"next_sentence_labels": torch.tensor([0])}, ValueError, "next_sentence_labels"),
        ({"input_ids": torch.arange(8, device="meta")}, ValueError, "expected the CPU"),
    ],
)
def test_packed_inputs_refuse(change, error, message):
    inputs = packed_example()
    names = (
        "batch",
        "input_ids",
        "token_type_ids",
        "masked_positions",
        "masked_labels",
        "next_sentence_labels",
    )
    arguments = {name: getattr(inputs, name) for name in names} | change
    with pytest.raises(error, match=message):
        PackedInputs.build(**arguments)
