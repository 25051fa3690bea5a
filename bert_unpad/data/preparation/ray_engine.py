"""Runs the jobs of a preparation as tasks of Ray (https://docs.ray.io), on one machine or many.

All machines have to see the output folder and the corpus under the same paths. A task whose worker
or machine is lost is run again; as its results are files that are renamed at the end, that changes
nothing.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from bert_unpad.data.preparation.engines import Job

_RETRIES = 10  # of a task whose worker was lost


class Ray:
    """Runs jobs in tasks of Ray, each on one core.

    Args:
        workers: tasks at once; None takes all cores of the cluster.
        address: of a running cluster, or "auto" for the one that this machine is part of; None
            starts one on this machine, which ends with this engine.

    Raises:
        ImportError: Ray is not installed.
        ValueError: `workers` is less than 1.
    """

    def __init__(self, workers: int | None = None, address: str | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers: expected at least 1, got {workers}")
        try:
            self._ray = importlib.import_module("ray")
        except ImportError as error:
            raise ImportError(
                "engine: ray needs the package `ray`: pip install 'bert_unpad[ray]'"
            ) from error
        self._given, self._address = workers, address
        self.workers = workers or 1

    def __enter__(self) -> Ray:
        options: dict[str, Any] = {"log_to_driver": False}
        if self._address is None:
            options |= {"num_cpus": self._given, "include_dashboard": False, "address": "local"}
        else:
            options["address"] = self._address
        self._ray.init(**options)
        # A cluster that starts machines when they are needed may have no cores yet.
        self.workers = self._given or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def run(self, job: Job, arguments: Sequence[tuple]) -> Iterator[dict[str, Any]]:
        """See `Engine`; tasks that still run when a job fails are cancelled.

        Raises:
            RuntimeError: a task was lost again and again.
        """
        ray = self._ray
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_run)
        left = (task.remote(job, one) for one in arguments)
        running = list(itertools.islice(left, self.workers))
        try:
            while running:
                (done,), running = ray.wait(running, num_returns=1)
                result = ray.get(done)
                running += itertools.islice(left, 1)
                yield result
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise RuntimeError(
                f"a worker of Ray was lost {_RETRIES + 1} times, perhaps because memory ran out; "
                "run the same command again: what is finished is kept"
            ) from error
        finally:
            for one in running:  # on a shared cluster they would go on
                # Killed, as an interruption can get lost; all files of a task are temporary.
                ray.cancel(one, force=True)


def _run(job: Job, arguments: tuple) -> dict[str, Any]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return job(*arguments)
