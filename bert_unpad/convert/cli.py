"""The command line of `python -m bert_unpad.convert`."""

import argparse
import dataclasses
import sys
from pathlib import Path

from bert_unpad.convert import google, huggingface, nvidia
from bert_unpad.nn.config_checks import GELU

LAYOUTS = {"hf": huggingface, "google": google, "nvidia": nvidia}
"""The module that reads and writes each layout."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit status: 0, 1 if the checkpoint cannot be converted, or 2 if a file is missing.
    """
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
        "--hidden-act",
        choices=GELU,
        help="activation to note in the configuration, if the source's means another: Google's and "
        "MLPerf's TensorFlow models compute the GELU of a bert_config.json by tanh, gelu_new",
    )
    parser.add_argument(
        "--allow-partial",
        action="store_true",
        help="list what is missing or unknown and convert all the same, unknown tensors too",
    )
    args = parser.parse_args(argv)

    def fail(message: object, status: int = 1) -> int:
        print(f"{parser.prog}: {message}", file=sys.stderr)
        return status

    if args.config is not None and not args.config.is_file():
        return fail(f"--config: {args.config} does not exist; expected a JSON file", 2)
    try:
        conversion = LAYOUTS[args.source_layout].read(args.source, args.config)
        conversion.check_tensors()
        if args.hidden_act is not None:
            conversion.config = dataclasses.replace(conversion.config, hidden_act=args.hidden_act)
    except FileNotFoundError as error:
        return fail(f"source: {error}", 2)
    except (OSError, ValueError) as error:
        return fail(error)
    report = conversion.report()
    for label, names in (("missing", report.missing), ("unknown", report.unexpected)):
        for name in names:
            print(f"{label}: {name}", file=sys.stderr)
    if report and not args.allow_partial:
        return fail("nothing written; --allow-partial converts the rest")
    for note in conversion.notes:
        print(note, file=sys.stderr)
    try:
        LAYOUTS[args.target_layout].write(conversion, args.target)
    except (OSError, ValueError) as error:
        return fail(f"target: {error}")
    print(f"{len(conversion)} tensors written to {args.target}")
    return 0
