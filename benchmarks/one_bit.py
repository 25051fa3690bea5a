"""Rates of compression to signs against a copy of memory, in one run.

    python -m benchmarks.one_bit                  # BERT-base's momentum on the CPU, about a minute
    python -m benchmarks.one_bit --device cuda    # BERT-large's on a GPU

Writes benchmarks/results/<device>/one_bit.json.
"""

from __future__ import annotations

import argparse
import os

from benchmarks.lib import harness, optim_steps, sign_rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=int, help="default: 110 M on a CPU, 336 M on a GPU")
    parser.add_argument("--ranks", type=int, default=8, help="whose signs are added up")
    parser.add_argument("--rounds", type=int, help="default: 9 on a CPU, 50 on a GPU")
    parser.add_argument("--allocator", choices=["heap", "default"], default="heap")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    allocator = harness.fix_allocator(args.allocator)
    numel = args.numel or (336_000_000 if on_gpu else 110_000_000)
    report = sign_rates.run(args.device, numel, args.ranks, args.rounds or (50 if on_gpu else 9))
    if not args.dry:
        settings = {"allocator": allocator, "load_average": os.getloadavg()[0]}
        folder, command = optim_steps.folder(args.device), harness.command()
        print(f"written to {harness.save('one_bit', folder, command, settings | report)}")


if __name__ == "__main__":
    main()
