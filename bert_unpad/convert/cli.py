"""The command line of `python -m bert_unpad.convert`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bert_unpad.convert import google, huggingface, nvidia

__all__ = ["LAYOUTS", "main"]

LAYOUTS = {"hf": huggingface, "google": google, "nvidia": nvidia}
"""Layout -> the module that reads and writes it."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bert_unpad.convert",
        description="Converts BERT pretraining checkpoints between the layouts in use.",
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--from", dest="source_layout", choices=LAYOUTS, default="hf")
    parser.add_argument("--to", dest="target_layout", choices=LAYOUTS, default="hf")
    parser.add_argument("--config", type=Path, help="config.json of a source that holds none")
    parser.add_argument(
        "--allow-partial",
        action="store_true",
        help="list what is missing or unknown and convert all the same, unknown tensors too",
    )
    args = parser.parse_args(argv)
    try:
        conversion = LAYOUTS[args.source_layout].read(args.source, args.config)
        conversion.check_shapes()
    except (OSError, ValueError, json.JSONDecodeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    report = conversion.report()
    for label, names in (("missing", report.missing), ("unknown", report.unexpected)):
        for name in names:
            print(f"{label}: {name}", file=sys.stderr)
    if report and not args.allow_partial:
        print(f"{parser.prog}: nothing written; --allow-partial converts the rest", file=sys.stderr)
        return 1
    for note in conversion.notes:
        print(note, file=sys.stderr)
    LAYOUTS[args.target_layout].write(conversion, args.target)
    print(f"{len(conversion)} tensors written to {args.target}")
    return 0
