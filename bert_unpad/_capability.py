"""Which GPUs multiply which precisions: the least compute capability of each.

Tensor cores multiply fp16 from Turing on, bf16 from Ampere on and 8 bits from Ada on. fp32 needs no
tensor cores, but the CUDA operators are compiled for Turing and later GPUs alone.
"""

import torch

from bert_unpad._choices import Precision

Capability = tuple[int, int]
"""Major and minor number of a compute capability."""
LEAST_CAPABILITY: dict[Precision, Capability] = {
    "fp32": (7, 5),
    "fp16": (7, 5),
    "bf16": (8, 0),
    "fp8": (8, 9),
}
"""The compute capability that a GPU needs to multiply a precision."""


def reaches(capability: Capability, precision: Precision) -> bool:
    """Whether a GPU of that compute capability multiplies a precision."""
    return capability >= LEAST_CAPABILITY[precision]


def multiplies(device: torch.device, precision: Precision) -> bool:
    """Whether a device multiplies a precision; all that are no GPU do, some slowly."""
    if device.type != "cuda":
        return True
    return reaches(torch.cuda.get_device_capability(device), precision)
