"""The options of `python -m bert_unpad.plan`."""

import argparse
from pathlib import Path

from bert_unpad._arguments import above_zero, names_of, not_below_zero, positive, share
from bert_unpad.costs.cards import CARDS
from bert_unpad.costs.sync import HOOK_COMPRESSIONS
from bert_unpad.costs.workload import OPTIMIZERS, PRECISIONS, STRATEGIES
from bert_unpad.plan.candidates import RECOMPUTE, SHARDS, Allowed


def make_parser() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m bert_unpad.plan",
        description="Finds the fastest configuration of a training run on given hardware and says "
        "how long it takes, what it costs and what holds it back, for 1 to --nodes nodes.",
    )
    _add_run(parser.add_argument_group("what is trained"))
    _add_hardware(parser.add_argument_group("on what"))
    _add_choice(parser.add_argument_group("what may be used"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time against cost (png, pdf, svg)"
    )
    return parser


def _add_run(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--model",
        default="base",
        help="base (default), large, a config.json in Hugging Face's layout, or a "
        "recipe (YAML), whose batch, updates, precision, optimizer and lengths then count where "
        "no option says otherwise",
    )
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a key of the recipe, as model.preset=bert-large",
    )
    run.add_argument(
        "--data",
        default="wikipedia",
        help="lengths: wikipedia (default), a text file whose line i is the number of sequences "
        "of length i, or a folder of prepared data",
    )
    run.add_argument(
        "--max-length", type=positive, help="longest sequence; longer ones count as cut off"
    )
    run.add_argument("--global-batch", type=positive, help="sequences of an update (default 256)")
    amount = run.add_mutually_exclusive_group()
    amount.add_argument("--steps", type=positive, help="updates of the run")
    amount.add_argument("--epochs", type=above_zero, help="passes over the data (default 1)")
    size = run.add_mutually_exclusive_group()
    size.add_argument(
        "--examples", type=positive, help="sequences of an epoch (default: as many as --data has)"
    )
    size.add_argument("--tokens", type=above_zero, help="the same, as real tokens: 3.3e9")
    run.add_argument("--precision", choices=PRECISIONS, help="default bf16")
    run.add_argument(
        "--bucket-mb",
        type=above_zero,
        help="MiB of gradients synced together (default: DDP's 25, the first 1)",
    )
    run.add_argument("--optimizer", choices=OPTIMIZERS, help="default adamw")
    run.add_argument("--strategy", choices=STRATEGIES, help="default stratified")


def _add_hardware(hardware: argparse._ArgumentGroup) -> None:
    what = hardware.add_mutually_exclusive_group()
    what.add_argument(
        "--card",
        default="a100-80",
        help=f"one of {', '.join(CARDS)}; or several, comma-separated, which equal parts of the "
        "ranks have",
    )
    what.add_argument(
        "--calibrate",
        nargs="?",
        type=above_zero,
        const=60.0,
        metavar="SECONDS",
        help="instead of --card: measure this machine's device, for 60 s if nothing else is given; "
        "started by torchrun, the link between its processes too",
    )
    hardware.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="for --calibrate (default cpu)"
    )
    hardware.add_argument("--gpus-per-node", type=positive, default=8, help="default 8")
    hardware.add_argument("--nodes", type=positive, default=1, help="most nodes (default 1)")
    hardware.add_argument(
        "--network", default="10G", help="of a node: 100M, 1G, 10G (default), ..., IB, IB-NDR"
    )
    hardware.add_argument(
        "--adapters", type=positive, default=1, help="of that kind in a node (default 1)"
    )
    hardware.add_argument(
        "--latency",
        type=not_below_zero,
        metavar="MICROSECONDS",
        help="of a message between nodes (default 30, InfiniBand 10)",
    )
    hardware.add_argument(
        "--intra-node",
        help="within a node: nvlink, pcie, or GB/s of a rank (default: what the card usually has)",
    )
    hardware.add_argument(
        "--products-share",
        type=share,
        metavar="SHARE",
        help="of a card's peak that matrix products reach (default: fitted to published runs, by "
        "generation)",
    )
    hardware.add_argument(
        "--memory-share",
        type=share,
        default=0.9,
        metavar="SHARE",
        help="of a card's memory that a run may use (default 0.9)",
    )
    hardware.add_argument(
        "--price",
        type=not_below_zero,
        help="of a card and hour, in any currency (default: the table's, in US dollars)",
    )


def _add_choice(choice: argparse._ArgumentGroup) -> None:
    choice.add_argument(
        "--compression",
        type=names_of(HOOK_COMPRESSIONS),
        default=list(Allowed.compressions),
        help="comma-separated, of none,bf16,power_sgd (default none,bf16: power_sgd changes more "
        "of what is learned)",
    )
    choice.add_argument(
        "--recompute",
        type=names_of(RECOMPUTE),
        default=list(RECOMPUTE),
        help="comma-separated, of none,gelu,layer (default all)",
    )
    choice.add_argument(
        "--shard",
        type=names_of(SHARDS),
        default=list(Allowed.shards),
        help="who shares the optimizer's state out: comma-separated, of "
        "none,node,world,overlap,fsdp (default none,node,world: the others do without CUDA graphs)",
    )
    choice.add_argument(
        "--local-sgd",
        type=positive,
        default=1,
        metavar="UPDATES",
        help="average over nodes only so often, where that is faster; 1 (default): always",
    )
