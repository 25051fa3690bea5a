"""Two hosts on one machine: network namespaces joined by a link of limited rate (Linux, root).

A pair of virtual network devices has one end in each namespace; `tbf`, the kernel's token bucket
filter, holds what leaves each end to the rate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Hosts", "loopback", "two_hosts"]


@dataclass(frozen=True)
class Hosts:
    """Where two processes run, and how they reach each other."""

    prefixes: tuple[list[str], list[str]]
    """Goes before each process's command."""
    interfaces: tuple[str, str]
    """Names of their network devices."""
    address: str
    """Of the first."""


def loopback() -> Hosts:
    """Both on this host, joined by its loopback device."""
    return Hosts(([], []), ("lo", "lo"), "127.0.0.1")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


@contextmanager
def two_hosts(rate: str) -> Iterator[Hosts]:
    """Makes the namespaces, and removes them in the end.

    Args:
        rate: of the link, in each direction, as `tc` reads it: 200mbit, 1gbit.

    Raises:
        PermissionError: the rights, `ip` or `tc` are missing; the message says which.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise PermissionError(f"`{tool}` is not installed (package iproute2)")
    names = [f"bu{os.getpid()}{end}" for end in "ab"]
    devices = [f"{name}v" for name in names]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for i, (name, device) in enumerate(zip(names, devices, strict=True)):
            _run("ip", "link", "set", device, "netns", name)
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "address", "add", f"10.99.0.{i + 1}/24", "dev", device)
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "link", "set", device, "up")
            _run(
                *(*inside, "tc", "qdisc", "add", "dev", device, "root"),
                *("tbf", "rate", rate, "burst", "256kb", "latency", "100ms"),
            )
        prefixes = tuple(["ip", "netns", "exec", name] for name in names)
        yield Hosts(prefixes, tuple(devices), "10.99.0.1")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
