"""Measures in about a minute what a plan needs of this machine: passes, updates, sync.

Started by torchrun, all ranks measure at the same time, so that what they contend for (cores,
memory) is in the figures, and then the links between them too.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.device import Device
from bert_unpad.costs.error_band import CHECKED
from bert_unpad.costs.measure import CompressionTimer, PassTimer, fit_link, link_times
from bert_unpad.costs.network import Link
from bert_unpad.costs.sync import HOOK_COMPRESSIONS
from bert_unpad.costs.workload import Workload
from bert_unpad.nn import EncoderForPreTraining


@dataclass(frozen=True)
class Calibration:
    """Measurements of this machine."""

    device: Device
    link: Link | None
    """The link between the ranks of the process group; None if there is one rank only."""
    timings: list[dict[str, float]]
    """For each batch: sequences, tokens, measured and fitted seconds of a pass."""


@contextmanager
def process_group(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A group of this rank alone.

    It lies within the process group that is there; if there is none, within a new one, torchrun's
    or of one rank, which ends with this context.
    """
    made = not dist.is_initialized()
    if made:
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "WORLD_SIZE" in os.environ:
            if device.type == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone, _ = dist.new_subgroups(group_size=1)
        yield alone
    finally:
        if made:
            dist.destroy_process_group()


def calibrate(
    workload: Workload,
    *,
    device: torch.device | str = "cpu",
    seconds: float = 60.0,
    memory_share: float = 0.9,
) -> Calibration:
    """Measures this machine's device, on all ranks at once if torchrun has started several.

    Args:
        workload: whose model, precision, optimizer and longest sequence are used.
        device: where.
        seconds: that it may take, about; a model of which a few passes take longer takes longer.
        memory_share: of the device's memory (on a CPU, of a rank's part of the host's) that a run
            may use.

    Raises:
        ValueError: the times do not fit, see `ComputeCost.fit`.
    """
    device = torch.device(device)
    begin = time.perf_counter()
    with process_group(device) as alone:
        torch.manual_seed(0)
        model = EncoderForPreTraining(workload.config).to(device).train()
        model.bert.encoder.fp8 = workload.precision == "fp8"

        def left(share: float) -> float:
            """Seconds until that share of the time is used, by the first rank's clock."""
            spent = torch.tensor([time.perf_counter() - begin], device=device)
            dist.broadcast(spent, 0)
            return share * seconds - float(spent)

        compress = {}
        for number, name in enumerate(
            HOOK_COMPRESSIONS, start=1
        ):  # one copy of the model at a time
            timer = CompressionTimer(workload, model, name, alone)
            _sample(timer, left(0.1 * number))
            compress[name] = timer.median()
            del timer
        passes = PassTimer(workload, model)
        once = passes.sample()
        rows = max((n for n in (4, 16) if 5 * n * once <= left(0.9)), default=1)
        if rows > 1:
            passes = PassTimer(workload, model, rows)
        _sample(passes, left(0.9))
        link = None
        if dist.get_world_size() > 1:
            link = fit_link(*link_times(device, max(left(1.0), 1.0)), dist.get_world_size())
        found, timings = measured_device(device, passes, compress, memory_share)
    return Calibration(found, link, timings)


def measured_device(
    device: torch.device,
    passes: PassTimer,
    compress: Mapping[str, float],
    memory_share: float = 0.9,
) -> tuple[Device, list[dict[str, float]]]:
    """The device that timings describe, and each batch's measured and fitted seconds."""
    seconds, accumulate, clip, update = passes.medians()
    cost = ComputeCost.fit(passes.batches, seconds)
    found = Device(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU",
        memory=rank_memory(device) * memory_share,
        passes=cost,
        update=update,
        clip=clip,
        accumulate=accumulate,
        compress=dict(compress),
        band=CHECKED,
        one_bucket=device.type == "cpu",
    )
    return found, cost.compare(passes.batches, seconds)


def _sample(timer: PassTimer | CompressionTimer, seconds: float) -> None:
    """Three samples, or as many more (up to 50) as the time allows; as many on all ranks."""
    once = max(timer.sample(), 1e-6)
    for _ in range(round(min(max(seconds / once - 1, 2), 50))):
        timer.sample()


def rank_memory(device: torch.device) -> float:
    """Bytes of memory of a rank."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
