"""What a GPU's name tells: the folder of its results, and its peak by the data sheet.

    python -m benchmarks.lib.device     # the first GPU's folder; empty where PyTorch sees none

Needs PyTorch alone, so that scripts/gpu_check.sh can ask before anything is built.
"""

from __future__ import annotations

import re

import torch

# Dense bf16 FLOP/s from NVIDIA's data sheets, which state twice that for sparse matrices of the
# Hopper cards. A slice of a card (MIG) has another name.
_DENSE_BF16 = {
    r"NVIDIA H100 80GB HBM3|NVIDIA H200": 989.4e12,
    r"NVIDIA H100 NVL|NVIDIA H200 NVL": 835.5e12,
    r"NVIDIA H100 PCIe": 756e12,
    r"NVIDIA A100-(SXM4|PCIE)-\w+|NVIDIA A100 80GB PCIe": 312e12,
}


def data_sheet_peak(name: str) -> float | None:
    """Dense bf16 FLOP/s of the GPU with this name; None if it is not in the table."""
    return next((peak for known, peak in _DENSE_BF16.items() if re.fullmatch(known, name)), None)


def folder(name: str) -> str:
    """'NVIDIA H100 80GB HBM3' -> 'nvidia-h100-80gb-hbm3'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    print(folder(torch.cuda.get_device_name()) if torch.cuda.is_available() else "")
