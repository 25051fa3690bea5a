"""Hosts on one machine: network namespaces joined by links of limited rate (Linux, root).

A pair of virtual network devices joins each namespace to a bridge, the switch; `tbf`, the kernel's
token bucket filter, holds what leaves each end to the rate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Hosts", "joined_hosts", "loopback"]


@dataclass(frozen=True)
class Hosts:
    """Where processes run, and how they reach each other."""

    prefixes: tuple[list[str], ...]
    """Goes before the command of a process on each host."""
    interfaces: tuple[str, ...]
    """Names of their network devices."""
    address: str
    """Of the first."""


def loopback() -> Hosts:
    """This host alone, whose processes meet on its loopback device."""
    return Hosts(([],), ("lo",), "127.0.0.1")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


@contextmanager
def joined_hosts(rate: str | None, count: int = 2) -> Iterator[Hosts]:
    """Makes the namespaces, and removes them in the end.

    Args:
        rate: of each host's link to the switch, in each direction, as `tc` reads it: 200mbit,
            1gbit; None for no limit.
        count: how many hosts.

    Raises:
        PermissionError: the rights, `ip` or `tc` are missing; the message says which.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise PermissionError(f"`{tool}` is not installed (package iproute2)")
    switch = f"bu{os.getpid()}s"
    names = [f"bu{os.getpid()}h{number}" for number in range(count)]
    devices = [f"{name}v" for name in names]
    try:
        _run("ip", "netns", "add", switch)
        at_switch = ("ip", "netns", "exec", switch)
        _run(*at_switch, "ip", "link", "add", "switch", "type", "bridge")
        _run(*at_switch, "ip", "link", "set", "switch", "up")
        for number, (name, device) in enumerate(zip(names, devices, strict=True)):
            port = f"port{number}"
            _run("ip", "netns", "add", name)
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "link", "add", device, "type", "veth", "peer", "name", port)
            _run(*inside, "ip", "link", "set", port, "netns", switch)
            _run(*inside, "ip", "address", "add", f"10.99.0.{number + 1}/24", "dev", device)
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "link", "set", device, "up")
            _run(*at_switch, "ip", "link", "set", port, "master", "switch")
            _run(*at_switch, "ip", "link", "set", port, "up")
            if rate is not None:
                for where, end in ((inside, device), (at_switch, port)):
                    _run(
                        *(*where, "tc", "qdisc", "add", "dev", end, "root"),
                        *("tbf", "rate", rate, "burst", "256kb", "latency", "100ms"),
                    )
        prefixes = tuple(["ip", "netns", "exec", name] for name in names)
        yield Hosts(prefixes, tuple(devices), "10.99.0.1")
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
