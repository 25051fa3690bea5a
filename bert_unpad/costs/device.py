"""What one rank's hardware costs a step (passes, updates, compression), and that of a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from bert_unpad.costs.cards import Card
from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.error_band import PUBLISHED
from bert_unpad.costs.kernels import pass_cost
from bert_unpad.costs.optimizers import OPTIMIZER_COSTS, muon_flops
from bert_unpad.costs.workload import Workload

# Share of a GPU's memory bandwidth that kernels which only stream reach; 0.8 to 0.9 is usual.
_STREAMED = 0.8

# Bytes for each parameter. Clipping reads the gradient for its norm, then scales it; accumulation
# reads two and writes one.
_CLIP_BYTES = 12
_ACCUMULATE_BYTES = 12
# Rounding weights reads fp32 twice, and writes a byte as it is and one transposed.
_ROUND_WEIGHTS_BYTES = 10

# The same for compressing: bf16 reads fp32 and writes 2 bytes, and back. PowerSGD adds the error to
# the gradient (3 passes of 4 bytes), copies it (2), multiplies it by Q and its transpose by P (2),
# writes PQ^T (1) and takes the new error (3).
# One bit: each side adds its error, finds the scale, writes signs and the new error.
_COMPRESS_BYTES = {"none": 0, "bf16": 12, "power_sgd": 44, "one_bit": 40}


@dataclass(frozen=True)
class Device:
    """The hardware of one rank, and how fast it is at one workload.

    Raises:
        ValueError: a number is negative, or the memory is not positive.
    """

    name: str
    memory: float
    """Bytes of memory that a run may use."""
    passes: ComputeCost
    """Cost of a forward and backward pass."""
    update: float
    """Seconds of the optimizer, not sharded."""
    clip: float = 0.0
    """Seconds of clipping the average."""
    accumulate: float = 0.0
    """Seconds that each further pass of an update takes to add to the gradients."""
    compress: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a sync computes, by compression; 0 for those that are not here."""
    band: float = 0.0
    """Share by which 9 of 10 figures are off at most, see `bert_unpad.costs.error_band`."""
    one_bucket: bool = False
    """Whether PowerSGD has one bucket for all gradients, as the trainer gives it on CPUs."""

    def __post_init__(self) -> None:
        if not self.memory > 0:
            raise ValueError(f"memory: expected bytes above 0, got {self.memory}")
        seconds = {"update": self.update, "clip": self.clip, "accumulate": self.accumulate}
        for name, value in {**seconds, **self.compress}.items():
            if not value >= 0:
                raise ValueError(f"{name}: expected seconds of 0 or more, got {value}")

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON keeps them."""
        return asdict(self)


def mixed_device(devices: Sequence[Device]) -> Device:
    """What stands for a rank where equal parts of the ranks have other hardware.

    Work is dealt in proportion to speed (`batching.rank_speeds`), so a pass takes as long on every
    rank as mean work at mean speed. What does not depend on the batch takes as long as on the
    slowest. Memory is the least, where a fast rank is taken to need as much more of it as it has
    more work.
    """
    if len(devices) == 1:
        return devices[0]
    speeds = np.array([1 / device.passes.linear for device in devices])
    shares = np.maximum(speeds / speeds.mean(), 1)
    quadratic = [device.passes.quadratic / device.passes.linear for device in devices]
    linear = float(1 / speeds.mean())
    return Device(
        name=" + ".join(device.name for device in devices),
        memory=float(min(d.memory / share for d, share in zip(devices, shares, strict=True))),
        passes=ComputeCost(
            linear, linear * max(quadratic), max(device.passes.fixed for device in devices)
        ),
        update=max(device.update for device in devices),
        clip=max(device.clip for device in devices),
        accumulate=max(device.accumulate for device in devices),
        compress={
            name: max(device.compress[name] for device in devices) for name in devices[0].compress
        },
        band=max(device.band for device in devices),
    )


def card_device(
    card: Card,
    workload: Workload,
    *,
    products_share: float | None = None,
    memory_share: float = 0.9,
) -> Device:
    """A GPU of the table, from its data sheet and two assumptions.

    Args:
        card: of compute capability 7.5 or later; for bf16 8.0, for fp8 8.9.
        workload: what is trained.
        products_share: share of the peak that matrix products reach; None: the card's, from
            `PRODUCTS_SHARE`.
        memory_share: of its memory that a run may use: CUDA's context, cuBLASLt's workspaces and
            gaps between blocks take the rest.

    Raises:
        ValueError: the card does not multiply the workload's precision.
    """
    if workload.precision == "bf16" and not card.has_bf16:
        raise ValueError(
            f"precision: expected fp16 or fp32 on {card.name}, whose tensor cores have no bf16, "
            "got 'bf16'"
        )
    if not card.peak(workload.precision):
        raise ValueError(
            f"precision: expected bf16, fp16 or fp32 on {card.name}, whose tensor cores have no "
            f"fp8, got {workload.precision!r}"
        )
    seconds = workload.parameters / (_STREAMED * card.bandwidth_gbs * 1e9)
    passes = [
        pass_cost(
            config, card, workload.precision, workload.longest, products_share, workload.masked
        )
        for config in workload.encoders
    ]
    update = OPTIMIZER_COSTS[workload.optimizer].traffic * seconds
    if workload.precision == "fp8":  # weights are rounded to 8 bits once an update
        update += _ROUND_WEIGHTS_BYTES * seconds
    if workload.optimizer == "muon":
        share = card.products_share("bf16") if products_share is None else products_share
        update += muon_flops(workload.config) / (share * card.peak("bf16"))
    return Device(
        name=card.name,
        memory=card.memory_gb * 1e9 * memory_share,
        passes=ComputeCost(
            sum(cost.linear for cost in passes),
            sum(cost.quadratic for cost in passes),
            sum(cost.fixed for cost in passes),
        ),
        update=update,
        clip=_CLIP_BYTES * seconds,
        accumulate=_ACCUMULATE_BYTES * seconds,
        compress={name: size * seconds for name, size in _COMPRESS_BYTES.items()},
        band=PUBLISHED.most,
    )
