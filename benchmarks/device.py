"""The folder name of the first GPU's results; empty where PyTorch sees none.

    python -m benchmarks.device

Needs PyTorch alone, so that scripts/gpu_check.sh can ask before anything is built.
"""

from __future__ import annotations

import re

import torch


def folder(name: str) -> str:
    """'NVIDIA H100 80GB HBM3' -> 'nvidia-h100-80gb-hbm3'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    print(folder(torch.cuda.get_device_name()) if torch.cuda.is_available() else "")
