"""A whole encoder as one operator, against fp64."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bert_unpad import _C
from bert_unpad.ops.encoder_layer import (
    Affine,
    EncoderEmbeddings,
    LayerShape,
    encoder_model,
    pack_weight,
)
from tests.ops.test_encoder_layer import FORMS, make, normalised, reference

ENTRIES, POSITIONS = 50, 40
ISA = _C.cpu_isa()
LENGTHS = [[1], [16], [3, 9, 1, 4], [37, 5, 30, 12, 33, 8, 20]]
Layers = tuple[list[Tensor], list[LayerShape]]


def embeddings(hidden: int, form: str) -> EncoderEmbeddings:
    def norm() -> Affine:
        return Affine(torch.rand(hidden) + 0.5, None if rms else torch.randn(hidden))

    tables = [torch.randn(n, hidden) for n in (ENTRIES, POSITIONS, 2)]
    rms, first = form == "EuroBERT's", form in ("ModernBERT's", "EuroBERT's", "norms first")
    return EncoderEmbeddings(
        tables[0],
        *((None, None) if rms else tables[1:]),
        norm=None if rms else norm(),
        final_norm=norm() if first else None,
        eps=(1e-3, 1e-2),
    )


def batch(lengths: list[int], side: str = "right") -> tuple[Tensor, Tensor, Tensor]:
    columns = max(lengths) + 2
    mask = torch.arange(columns) < torch.tensor(lengths)[:, None]
    if side == "left":
        mask = mask.flip(1)
    if side == "holes":
        mask = torch.stack([row[torch.randperm(columns)] for row in mask])
    ids = torch.randint(ENTRIES, mask.shape)
    return ids, mask, torch.randint(2, mask.shape)


def expected(
    ids: Tensor, mask: Tensor, types: Tensor | None, parts: EncoderEmbeddings, layers: list
) -> Tensor:
    """Hidden states of the tokens in fp64."""
    rms = any(s.rms for _, s in layers)
    x = parts.word.double()[ids]
    if parts.token_type is not None:
        x = x + parts.token_type.double()[torch.zeros_like(ids) if types is None else types]
    if parts.position is not None:
        places = torch.arange(ids.shape[1]).expand(ids.shape) + parts.first_position
        if parts.padding_id >= 0:
            real = (ids != parts.padding_id).long()
            places = real.cumsum(1) * real + parts.padding_id
        x = x + parts.position.double()[places]
    x = normalised(x[mask], parts.norm, rms, parts.eps[0])
    cu_seqlens = torch.tensor([0, *itertools.accumulate(mask.sum(1).tolist())], dtype=torch.int32)
    for p, s in layers:
        x = reference(x, cu_seqlens, p, s)
    return normalised(x, parts.final_norm, rms, parts.eps[1])


def run(batch: tuple, parts: EncoderEmbeddings, layers: list, **more) -> Tensor:
    tensors = [t for p, _ in layers for t in p.tensors()]
    return encoder_model(*batch, parts, tensors, [s for _, s in layers], **more)


def near(found: Tensor, want: Tensor) -> bool:
    return bool((found - want).abs().max() < 2e-5 * want.abs().max())


@pytest.mark.parametrize("side", ["right", "left", "holes"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_equals_plain_pytorch(form: str, lengths: list[int], side: str) -> None:
    layers = [make(**FORMS[form]) for _ in range(2)]
    parts = embeddings(layers[0][0].query.weight.shape[1], form)
    ids, mask, types = batch(lengths, side)
    if layers[0][1].rotary[0] and side == "holes":
        pytest.skip("the reference counts tokens, not columns")
    want = expected(ids, mask, types, parts, layers)
    found = run((ids, mask, types), parts, layers)
    assert near(found[mask], want)
    assert not found[~mask].any()
    assert torch.equal(run((ids, mask.long(), types), parts, layers), found)
    rows = want.split(mask.sum(1).tolist())
    means = torch.stack([row.mean(0) for row in rows])
    assert near(run((ids, mask, types), parts, layers, result="mean"), means)
    if side == "right":
        first = run((ids, mask, types), parts, layers, result="first")
        assert near(first, torch.stack([row[0] for row in rows]))


def test_no_mask_and_no_token_types() -> None:
    layers = [make()]
    parts, (ids, _, _) = embeddings(64, ""), batch([9, 9])
    everything = torch.ones_like(ids, dtype=torch.bool)
    found = run((ids, None, None), parts, layers)
    assert near(found.flatten(0, 1), expected(ids, everything, None, parts, layers))
    assert torch.equal(found, run((ids, everything, torch.zeros_like(ids)), parts, layers))


@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_positions_counted_from_ids(side: str) -> None:
    layers, (ids, mask, types) = [make()], batch([12, 3, 7], side)
    ids[~mask] = 1
    ids[0, mask[0].nonzero()[4]] = 1  # padding that the mask keeps
    parts = embeddings(64, "")._replace(first_position=2, padding_id=1)
    want = expected(ids, mask, types, parts, layers)
    assert near(run((ids, mask, types), parts, layers)[mask], want)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_weights(lengths: list[int], dtype: torch.dtype, threads: int) -> None:
    layers, (ids, mask, types) = [make(gated=True), make()], batch(lengths)
    parts = embeddings(64, "")
    parameters = [t for p, _ in layers for t in p.tensors()]
    if dtype == torch.bfloat16 and not ISA.endswith(("bf16", "amx")):
        with pytest.raises(RuntimeError, match="this CPU multiplies no bf16"):
            pack_weight(parameters[0], dtype)
        return
    packed = [pack_weight(t, dtype) if t.dim() == 2 else t for t in parameters]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = encoder_model(ids, mask, types, parts, packed, [s for _, s in layers])[mask]
    finally:
        torch.set_num_threads(before)
    want = expected(ids, mask, types, parts, layers)
    if dtype == torch.float32:
        assert near(found, want)
    else:
        limit = 5e-3 if dtype == torch.int8 else 1e-4
        assert functional.cosine_similarity(found.double(), want).min() > 1 - limit


def test_no_layers_no_rows_and_no_tokens() -> None:
    parts, (ids, mask, types) = embeddings(64, ""), batch([3, 1])
    want = expected(ids, mask, types, parts, [])
    assert near(run((ids, mask, types), parts, [])[mask], want)
    assert run((ids[:0], mask[:0], types[:0]), parts, [make()]).shape == (0, ids.shape[1], 64)
    none = torch.zeros_like(mask)
    for result in ("hidden", "mean"):
        assert not run((ids, none, types), parts, [make()], result=result).any()


def test_bad_input() -> None:
    layers, (ids, mask, types) = [make()], batch([3, 2])
    parts = embeddings(64, "")

    def fails(match: str, kind: type = RuntimeError, **changes) -> None:
        given = {"ids": ids, "mask": mask, "types": types, "parts": parts, "more": {}} | changes
        call = given["ids"], given["mask"], given["types"]
        with pytest.raises(kind, match=match):
            run(call, given["parts"], layers, **given["more"])

    fails("input_ids: expected a tensor, got None", TypeError, ids=None)
    fails(r"ids must have shape \[rows, columns\]", ids=ids[0])
    fails("ids must be int64", ids=ids.int())
    fails("ids must be contiguous", ids=ids.repeat(1, 2)[:, ::2])
    fails(r"ids: 50 is not in \[0, 50\)", ids=ids.masked_fill(mask, ENTRIES))
    fails(r"ids: -1 is not in \[0, 50\)", ids=ids.masked_fill(mask, -1))
    fails(r"token_types: 2 is not in \[0, 2\)", types=torch.full_like(types, 2))
    fails("token_types must have shape", types=types[:1])
    fails(r"positions: 40 is not in \[0, 40\)", parts=parts._replace(first_position=40))
    fails("mask must have shape", mask=mask[:, :1])
    fails("mask must be int64 or bool", mask=mask.int())
    fails("mask must hold only 0", mask=mask.long() * 2)
    late = {"mask": mask.flip(1), "more": {"reads_first": True}}
    fails("the first position, which the model may read, is padding in row 0", **late)
    layers[0] = make(window=(2, 2))
    fails("there is padding between tokens, which counts in a window, in row 0",
          mask=torch.tensor([[True, False, True, False, False]] * 2))  # fmt: skip
    layers[0] = make()
    fails("the first position", mask=mask.flip(1), more={"result": "first"})
    fails("result: expected one of hidden, mean, first, got 'last'", ValueError,
          more={"result": "last"})  # fmt: skip
    fails(r"embeddings\[0\] must have shape", parts=parts._replace(word=torch.randn(4, 9)))
    fails(r"embeddings\[1\] must have rows of 64", parts=parts._replace(position=torch.ones(9, 32)))
    fails(r"embeddings\[2\] must be float32",
          parts=parts._replace(token_type=torch.ones(2, 64).double()))  # fmt: skip
    wrong = layers[0][0].tensors()[:-1]
    with pytest.raises(RuntimeError, match="parameters must hold 20 tensors a layer, got 19"):
        encoder_model(ids, mask, types, parts, wrong, [layers[0][1]])


@pytest.mark.parametrize("result", ["hidden", "mean", "first"])
def test_no_derivative(result: str) -> None:
    layers, call = [make()], batch([3, 2])
    parts = embeddings(64, "")
    parts.word.requires_grad_()
    out = run(call, parts, layers, result=result)
    with pytest.raises(NotImplementedError, match="encoder_model"):
        out.sum().backward()
