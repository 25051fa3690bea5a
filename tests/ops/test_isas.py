"""The row-wise operators and attention in every instruction set this machine has."""

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from tests.support.attention_cases import DTYPES, PARTS, Case, random_buckets, with_gradients
from tests.support.op_checks import results_of_every_isa
from tests.support.seeds import derived


def attention(*cases: Case) -> list[Tensor]:
    """Results and gradients of each case, in every dtype."""
    results = []
    for dtype in DTYPES:
        for case in cases:
            results += with_gradients(case.ours, case.inputs(dtype), case.dout(dtype))
    return results


def compute() -> dict[str, list[Tensor]]:
    torch.manual_seed(derived(0))
    lengths, bias = [3, 0, 77, 800], {"buckets": random_buckets(20, 5), "parts": PARTS}
    windows = (Case(lengths, head_dim=40, window=w, p=0.1) for w in ((-1, 0), (20, 33)))
    return {
        "rows": row_wise(),
        "attention": attention(Case([3, 0, 77, 100], head_dim=40, p=0.1), *windows),
        "position_bias": attention(Case(lengths, head_dim=40, **bias)),
    }


def row_wise() -> list[Tensor]:
    """Whole vectors, strips and tails of every width; the same inputs for all instruction sets."""
    torch.manual_seed(derived(0))
    rng = torch.tensor([5, 6])
    results = []

    def keep(out, *leaves):
        (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append(out.detach())
        results.extend(x.grad for x in leaves)

    def leaf(*shape, dtype=torch.float32):
        return torch.randn(shape).to(dtype).requires_grad_()

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for hidden in (7, 64, 203):
            x, residual = leaf(40, hidden, dtype=dtype), leaf(40, hidden, dtype=dtype)
            w, b, xb = leaf(hidden), leaf(hidden), leaf(hidden)
            keep(
                ops.dropout_add_layer_norm(
                    x, residual, w, b, dropout_p=0.2, x_bias=xb, rng=rng, eps=1e-5
                ),
                x,
                residual,
                w,
                b,
                xb,
            )
            x, residual = leaf(40, hidden, dtype=dtype), leaf(40, hidden, dtype=dtype)
            w, xb = leaf(hidden), leaf(hidden)
            both = ops.dropout_add_rms_norm(
                x, residual, w, dropout_p=0.2, x_bias=xb, rng=rng, return_sum=True
            )
            keep(torch.stack(both), x, residual, w, xb)
            for form in ("none", "tanh"):
                x, b = leaf(40, hidden, dtype=dtype), leaf(hidden)
                keep(ops.bias_gelu(x, b, approximate=form), x, b)
            for kind in ("gelu", "gelu_tanh", "silu", "relu"):
                x, b = leaf(40, 2 * hidden, dtype=dtype), leaf(2 * hidden)
                keep(ops.glu(x, kind, b), x, b)
            for interleaved in (False, True):
                x, positions = leaf(40, 3, hidden, dtype=dtype), torch.arange(40) * 997
                turned = ops.rotary_(
                    *(x * 1, positions),
                    heads=2,
                    rotary_dim=hidden // 2 * 2,
                    interleaved=interleaved,
                )
                keep(turned, x)
            ids = [torch.randint(n, (40,)) for n in (9, 5, 2)]
            tables = [leaf(n, hidden) for n in (9, 5, 2)]
            w, b = leaf(hidden), leaf(hidden)
            y = ops.embedding_layer_norm(
                *ids, *tables, w, b, dropout_p=0.2, rng=rng, out_dtype=dtype
            )
            keep(y, *tables, w, b)
            logits = leaf(12, hidden, dtype=dtype)
            labels = torch.randint(hidden - 2, (12,))
            loss, correct = ops.masked_cross_entropy(logits, labels, vocab_size=hidden - 2)
            keep(loss, logits)
            results.append(correct)
        for size in (3, 1000, 40_001):
            bucket = torch.randn(size).to(dtype)
            results.append(ops.clip_bucket_(bucket, 1.0, factor=0.5))
            results.append(bucket)
    for wire in (torch.bfloat16, torch.float16):
        out, residual = torch.empty(1001, dtype=wire), torch.randn(1001) / 100
        results.append(ops.clip_bucket_(torch.randn(1001), 1.0, out=out, residual=residual))
        results.extend([out, out + residual])
    return results


@pytest.fixture(scope="module")
def computed() -> dict[str, dict[str, list[Tensor]]]:
    """By instruction set; each is a process of its own, so that all are asked for everything."""
    return results_of_every_isa(compute)


# Units of the largest value: a few roundings, 1 in 16 bits, the order of sums in fp32; some
# instruction sets round attention weights once more.
@pytest.mark.parametrize(
    ("name", "fp32_units", "low_units"),
    [("rows", 20, 2), ("attention", 20, 3), ("position_bias", 40, 4)],
)
def test_all_instruction_sets_agree(
    computed: dict[str, dict[str, list[Tensor]]], name: str, fp32_units: int, low_units: int
) -> None:
    first = computed["generic"][name]
    for isa, found in computed.items():
        for i, (a, b) in enumerate(zip(first, found[name], strict=True)):
            assert a.dtype == b.dtype
            unit = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
            units = low_units if a.dtype != torch.float32 else fp32_units
            limit = units * unit * a.abs().max()
            assert (a.double() - b.double()).abs().max() <= limit, (isa, i, a.dtype, a.shape)
