"""Step time of the optimizers on a BERT's parameters, against PyTorch's and a copy of memory.

    python -m benchmarks.optim                  # BERT-base on the CPU, about a minute
    python -m benchmarks.optim --device cuda    # BERT-large on a GPU

Writes benchmarks/results/<device>/optim.json.
"""

from __future__ import annotations

import argparse
import os

from benchmarks.lib import harness, optim_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--model",
        choices=optim_steps.SIZES,
        help="default: bert-base on a CPU, bert-large on a GPU",
    )
    parser.add_argument("--rounds", type=int, help="default: 9 on a CPU, 50 on a GPU")
    parser.add_argument("--allocator", choices=["heap", "default"], default="heap")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    allocator = harness.fix_allocator(args.allocator)
    model = args.model or ("bert-large" if on_gpu else "bert-base")
    report = optim_steps.run(args.device, model, args.rounds or (50 if on_gpu else 9))
    if not args.dry:
        settings = {"allocator": allocator, "load_average": os.getloadavg()[0]}
        command = harness.command()
        path = harness.save("optim", optim_steps.folder(args.device), command, settings | report)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
