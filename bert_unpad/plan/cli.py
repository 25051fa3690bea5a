"""The command `python -m bert_unpad.plan`: arguments in; tables, JSON or a plot out."""

import argparse
import json
import os
from collections.abc import Sequence

from bert_unpad.plan.choose import alternatives, curve, why_none
from bert_unpad.plan.inputs import allowed_of, hardware_of, workload_of
from bert_unpad.plan.options import make_parser
from bert_unpad.plan.planner import Planner
from bert_unpad.plan.plot import plot_curve
from bert_unpad.plan.report import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. Bad arguments exit with 2 and a message."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        plan = make_plan(options)
        if os.environ.get("RANK", "0") != "0":
            return 0
        if options.plot is not None:
            work = plan.planner.workload
            plot_curve(
                plan.curve,
                f"{work.parameters / 1e6:.0f} M parameters, {work.updates:,} updates of "
                f"{work.global_batch:,}, {plan.planner.device.name}",
                options.plot,
            )
    except (OSError, RuntimeError, ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    return 0


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that the options ask for.

    Raises:
        OSError, ValueError: an option is out of range or nothing fits; the message says which.
    """
    workload, bucket_mb = workload_of(options)
    device, cluster, price, basis = hardware_of(options, workload)
    planner = Planner(workload, device, cluster, None if bucket_mb is None else bucket_mb * 2**20)
    allowed = allowed_of(options)
    found = curve(planner, options.nodes, allowed, price)
    there = {choice.candidate.nodes for choice in found}
    left_out = {
        nodes: why_none(planner, nodes, allowed)
        for nodes in range(1, options.nodes + 1)
        if nodes not in there
    }
    if not found:
        raise ValueError(f"no configuration is possible: {left_out[options.nodes]}")
    return Plan(
        planner=planner,
        nodes=options.nodes,
        price=price,
        basis=basis,
        curve=found,
        alternatives=alternatives(planner, found[-1].candidate.nodes, allowed, price),
        left_out=left_out,
    )
