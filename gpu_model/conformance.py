"""What the primitives of csrc/cuda have to do, wherever they run.

Each check gets a function `call(name, *arguments)`, which runs an exported function of
conformance.cu or, check_wgmma, conformance_sm90a.cu, and the device that tensors have to be on.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

Call = Callable[..., None]
DTYPES = {torch.bfloat16: 1, torch.float16: 2}  # numbers as in csrc/common/types.h

# Of dropout's rule, with those at which its form changes.
THRESHOLDS = (0, 1, 655, 2046, 2047, 31744, 32768, 33790, 33791, 33792, 58982, 65535, 65536)


def _integers(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small enough that sums of products are exact in any order."""
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def check_mma(call: Call, device: str, dtype: torch.dtype) -> None:
    """Integers give exact sums: the layout. Normal values: the precision."""
    generator = torch.Generator().manual_seed(1)
    for exact in (True, False):
        if exact:
            a, b, c = (_integers(generator, dtype, *s) for s in ((16, 16), (8, 16), (16, 8)))
        else:
            a, b, c = (
                torch.randn(*s, generator=generator).to(dtype) for s in ((16, 16), (8, 16), (16, 8))
            )
        out = torch.empty(16, 8, device=device)
        c = c.float()
        call("conformance_mma", DTYPES[dtype], *(x.to(device) for x in (a, b, c)), out)
        want = a.double() @ b.double().T + c
        scale = a.double().abs() @ b.double().abs().T + c.abs()
        error = ((out.cpu() - want).abs() / scale.clamp_min(1)).max()
        # Tensor cores align products before adding, and truncate.
        assert error <= (0 if exact else 2e-6)


def check_matrices(call: Call, device: str) -> None:
    """Both forms of load_matrices, with rows anywhere, one of them given twice."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(-(2**15), 2**15, (32, 8), generator=generator, dtype=torch.int16)
    address = torch.randperm(32, generator=generator).int()
    address[5] = address[20]
    plain, transposed = (torch.empty(32, 4, dtype=torch.int32, device=device) for _ in range(2))
    call("conformance_matrices", rows.to(device), address.to(device), plain, transposed)
    matrices = rows[address.long()].view(4, 8, 8)
    for out, want in ((plain, matrices), (transposed, matrices.transpose(1, 2))):
        # Lane l has the pair at row l / 4, columns 2 (l % 4) and the next.
        pairs = want.reshape(4, 32, 2).transpose(0, 1).contiguous()
        assert torch.equal(out.cpu().view(torch.int16).view(32, 4, 2), pairs)


def check_shuffle(call: Call, device: str) -> None:
    x = torch.randn(32, generator=torch.Generator().manual_seed(3))
    floats = torch.empty(32, 32, device=device)
    numbers = torch.empty(32, 32, dtype=torch.int32, device=device)
    first = torch.empty(32, dtype=torch.int32, device=device)
    call("conformance_shuffle", x.to(device), floats, numbers, first)
    lane = torch.arange(32)
    source = lane[:, None] ^ lane  # [mask, lane]
    assert torch.equal(floats.cpu(), x[source])
    assert torch.equal(numbers.cpu().long(), source * 0x01010101)
    assert (first == 7).all()


def check_decisions(call: Call, device: str, threshold: int) -> None:
    """Dropout's rule for pairs, for all numbers of 16 bits: IEEE's comparison, the exact rate."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    pairs = torch.stack([every, every.flip(0)], 1).contiguous()
    masks = torch.empty(2**16, 2, dtype=torch.int16, device=device)
    values = torch.empty(2**16, 2, device=device)
    call("conformance_decisions", 2**16, threshold, pairs.to(device), masks, values)
    kept = masks.cpu() == -1
    assert torch.equal(kept, masks.cpu() != 0)
    assert torch.equal(values.cpu(), kept * torch.tensor([1.0, 2.0]))
    assert torch.equal(kept[:, 1], kept[:, 0].flip(0))
    assert kept[:, 0].sum() == threshold
    # All numbers on one side of a limit; NaNs are on the side of those that are not below it.
    numbers, kept = every.view(torch.float16), kept[:, 0]
    nans = bool(kept[numbers.isnan()].all())
    assert nans or not kept[numbers.isnan()].any()
    below, others = numbers[kept != nans], numbers[(kept == nans) & ~numbers.isnan()]
    assert below.numel() == 0 or others.numel() == 0 or below.max() < others.min()


def check_ballot(call: Call, device: str) -> None:
    """Every lane gets all votes."""
    generator = torch.Generator().manual_seed(7)
    votes = torch.randint(-(2**31), 2**31, (20,), generator=generator, dtype=torch.int64)
    votes = torch.cat([votes, torch.tensor([0, -1])]).int()
    words = torch.empty(22, 32, dtype=torch.int32, device=device)
    call("conformance_ballot", 22, votes.to(device), words)
    assert torch.equal(words.cpu(), votes[:, None].expand(22, 32))


def _hard_to_round(dtype: torch.dtype) -> Tensor:
    """fp32 values: every 16-bit value, the middles between neighbours, and what is next to these,
    and arbitrary bits; no NaN."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).float()
    values = values[values.isfinite()].sort().values
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    generator = torch.Generator().manual_seed(4)
    any_bits = torch.randint(-(2**31), 2**31, (2**16,), generator=generator, dtype=torch.int64)
    infinity = torch.tensor([torch.inf, -torch.inf])
    parts = [values, any_bits.to(torch.int32).view(torch.float32), infinity]
    for direction in (-torch.inf, torch.inf):
        parts.append(torch.nextafter(middles, torch.tensor(direction)))
    parts.append(middles)
    parts.append(torch.nextafter(values[-1:], infinity[:1]))
    x = torch.cat(parts)
    return x[~x.isnan()]


def check_pack(call: Call, device: str, dtype: torch.dtype) -> None:
    """pack rounds to nearest even and makes every NaN 0x7fff; unpack is exact."""
    x = _hard_to_round(dtype)
    not_numbers = torch.tensor([0x7FC00000, 0x7F800001, -1], dtype=torch.int32)
    x = torch.cat([x, not_numbers.view(torch.float32)])
    n = max(-(-x.numel() // 256), 2**15 // 128) * 128
    x = torch.nn.functional.pad(x, (0, 2 * n - x.numel()))
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    pairs = torch.nn.functional.pad(every, (0, 2 * n - 2**16))
    packed = torch.empty(2 * n, dtype=torch.int16, device=device)
    unpacked = torch.empty(2 * n, device=device)
    call(
        "conformance_pack",
        *(DTYPES[dtype], n, x.to(device), pairs.to(device), packed, unpacked),
    )
    want = x.to(dtype).view(torch.int16).masked_fill(x.isnan(), 0x7FFF)
    assert torch.equal(packed.cpu(), want)
    exact = pairs.view(dtype).float()
    nan = exact.isnan()
    assert torch.equal(unpacked.cpu().isnan(), nan)
    # Bits, because of -0.
    got = unpacked.cpu().masked_fill(nan, 0).view(torch.int32)
    assert torch.equal(got, exact.masked_fill(nan, 0).view(torch.int32))


def check_copy(call: Call, device: str) -> None:
    """Copies of 16 and of 4 bytes, and zeros where there is nothing to copy."""
    generator = torch.Generator().manual_seed(5)
    source = torch.randint(1, 2**31 - 1, (64, 4), generator=generator, dtype=torch.int32)
    valid = torch.randint(0, 2, (64,), generator=generator, dtype=torch.int32)
    quads = torch.empty(64, 4, dtype=torch.int32, device=device)
    words = torch.empty(64, dtype=torch.int32, device=device)
    call("conformance_copy", source.to(device), valid.to(device), quads, words)
    neighbour = torch.arange(64) ^ 1
    assert torch.equal(quads.cpu(), (source * valid[:, None])[neighbour])
    assert torch.equal(words.cpu(), (source[:, 1] * (1 - valid))[neighbour])


def check_tile(call: Call, device: str, dtype: torch.dtype) -> None:
    """Copies, swizzle, load_matrices and mma together: the products of attention."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (_integers(generator, dtype, 16, 64) for _ in range(3))
    x = _integers(generator, dtype, 16, 16)
    scores, out = torch.empty(16, 16, device=device), torch.empty(16, 64, device=device)
    call("conformance_tile", DTYPES[dtype], *(t.to(device) for t in (q, k, v, x)), scores, out)
    assert torch.equal(scores.cpu(), q.float() @ k.float().T)
    assert torch.equal(out.cpu(), x.float() @ v.float())


# Whether A is transposed, whether B is, columns; in the order of conformance_sm90a.cu, of which the
# first two take A from registers.
WGMMA_FORMS = [
    *((False, False, 64), (False, True, 64)),
    *((False, False, 64), (False, True, 64), (True, False, 64), (True, True, 64)),
    *((False, True, 32), (True, True, 32)),
]


def check_wgmma(call: Call, device: str, dtype: torch.dtype) -> None:
    """Products of a warpgroup, added to sums or not. Integers give exact sums: the layout. Normal
    values: the precision."""
    generator = torch.Generator().manual_seed(8)
    for form, (transposed_a, transposed_b, columns) in enumerate(WGMMA_FORMS):
        for adds, exact in itertools.product((False, True), (False, True)):
            shapes = (64, 64), (64, columns), (64, columns)
            if exact:
                a, b, c = (_integers(generator, dtype, *s) for s in shapes)
            else:
                a, b, c = (torch.randn(*s, generator=generator).to(dtype) for s in shapes)
            c = c.float() if adds else None
            out = torch.empty(64, columns, device=device)
            operands = (x if x is None else x.to(device) for x in (a, b, c))
            call("conformance_wgmma", DTYPES[dtype], form, *operands, out)
            left = a.double().T if transposed_a else a.double()
            right = b.double() if transposed_b else b.double().T
            start = 0 if c is None else c
            scale = left.abs() @ right.abs() + (0 if c is None else c.abs())
            error = ((out.cpu() - (left @ right + start)).abs() / scale.clamp_min(1)).max()
            # Tensor cores align products before adding, and truncate.
            assert error <= (0 if exact else 2e-6), (form, adds)
