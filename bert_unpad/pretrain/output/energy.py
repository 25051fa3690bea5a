"""The energy that a run takes: of its GPUs by NVML, of its machines' CPUs and memory by RAPL.

RAPL is read from Linux's powercap folder (Documentation/power/powercap/powercap.rst in the kernel):
zones `package-N`, which hold the cores, and `dram` in them. Newer kernels let only root read it.
NVML has the energy of a GPU since Volta (nvmlDeviceGetTotalEnergyConsumption). Network, disks, fans
and power supplies are in neither.
"""

import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bert_unpad.pretrain.ranks import Ranks

SOURCES = ("gpu", "cpu")
_POWERCAP = Path("/sys/class/powercap")
_EVERY = 10.0  # seconds; a counter of RAPL starts again after minutes


class _Unread(Exception):
    """A counter that cannot be read; the message says why."""


class _Rapl:
    """The joules of this machine's CPU packages and memory since it was made.

    Raises:
        _Unread: there are no such counters, or they may not be read.
    """

    def __init__(self) -> None:
        self._counters: list[tuple[Path, int]] = []
        try:
            for zone in sorted(_POWERCAP.glob("intel-rapl:*")):
                if (zone / "name").read_text().startswith(("package", "dram")):
                    limit = int((zone / "max_energy_range_uj").read_text())
                    self._counters.append((zone / "energy_uj", limit))
            self._last = self._values()
        except (OSError, ValueError) as error:
            raise _Unread(str(error)) from error
        if not self._counters:
            raise _Unread(f"there is no zone of RAPL in {_POWERCAP}")
        self._joules = 0.0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._follow, name="energy", daemon=True).start()

    def read(self) -> float:
        """The joules; NaN once a counter could not be read."""
        with self._lock:
            try:
                values = self._values()
            except (OSError, ValueError):
                self._joules, values = math.nan, self._last
            for new, old, (_, limit) in zip(values, self._last, self._counters, strict=True):
                self._joules += (new - old if new >= old else new + limit - old) / 1e6
            self._last = values
            return self._joules

    def close(self) -> None:
        self._ended.set()

    def _values(self) -> list[int]:
        return [int(path.read_text()) for path, _ in self._counters]

    def _follow(self) -> None:
        """Reads often enough that no counter starts again twice between two readings."""
        while not self._ended.wait(_EVERY):
            self.read()


class _Nvml:
    """The joules of one GPU since it was made.

    Raises:
        _Unread: the package nvidia-ml-py or the driver is missing, or the GPU has no such counter.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml
        except ModuleNotFoundError as error:
            raise _Unread("pip install 'bert_unpad[energy]' installs nvidia-ml-py") from error
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _Unread(str(error)) from error
        try:
            # Not by its number: CUDA_VISIBLE_DEVICES changes those of CUDA, not those of NVML.
            uuid = torch.cuda.get_device_properties(device).uuid
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._first = self._millijoules()
        except BaseException as error:
            self.close()
            if isinstance(error, pynvml.NVMLError):
                raise _Unread(str(error)) from error
            raise

    def read(self) -> float:
        """The joules; NaN if the counter cannot be read any more."""
        try:
            return (self._millijoules() - self._first) / 1e3
        except self._nvml.NVMLError:
            return math.nan

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _millijoules(self) -> int:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)


class EnergyMeter:
    """The energy of a run on all its ranks. All ranks must make the same calls.

    Every rank reads its GPU, and the first rank of each machine its CPUs. What one of them cannot
    read counts as missing for the whole run.

    Args:
        ranks: the processes of the run.
        before: what `joules` returned last in an earlier start of the run; None: there was none.

    Attributes:
        missing: why a source is not read, by its name in SOURCES. A run on CPUs has no GPUs.
    """

    def __init__(self, ranks: Ranks, before: Mapping[str, float | None] | None) -> None:
        self._ranks = ranks
        self._before = before
        self._readers: dict[str, _Rapl | _Nvml] = {}
        self.missing: dict[str, str] = {}
        makers: dict[str, Callable[[], _Rapl | _Nvml]] = {"cpu": _Rapl}
        if ranks.device.type == "cuda":
            makers = {"gpu": lambda: _Nvml(ranks.device), **makers}
        self._sources = tuple(makers)
        try:
            self._open(makers)
        except BaseException:  # another rank may have ended
            self.close()
            raise

    def _open(self, makers: Mapping[str, Callable[[], _Rapl | _Nvml]]) -> None:
        ranks, before = self._ranks, self._before
        for source, make in makers.items():
            problem = ""
            if source == "gpu" or ranks.is_first_of_node:
                try:
                    self._readers[source] = make()
                except _Unread as error:
                    problem = str(error)
            unread = [rank for rank, bad in enumerate(ranks.gather(bool(problem))) if bad]
            if unread:
                self.missing[source] = problem or f"rank {unread[0]} cannot read it"
            elif before is not None and before.get(source) is None:
                self.missing[source] = "an earlier start of the run did not read it"

    def joules(self) -> dict[str, float | None]:
        """The joules of the run so far, of each source; None where it is missing."""
        totals: dict[str, float | None] = dict.fromkeys(SOURCES)
        for source in [x for x in SOURCES if x in self._sources and x not in self.missing]:
            reader = self._readers.get(source)
            total = sum(self._ranks.gather(0.0 if reader is None else reader.read()))
            if math.isnan(total):
                self.missing[source] = "its counter could be read at the start only"
            else:
                totals[source] = total + ((self._before or {}).get(source) or 0.0)
        return totals

    def close(self) -> None:
        """Ends the reading."""
        for reader in self._readers.values():
            reader.close()


def joules_per_sequence(joules: Mapping[str, float | None], sequences: int) -> float | None:
    """The joules of all sources that were read for each sequence trained on; None: none was."""
    read = [value for value in joules.values() if value is not None]
    return sum(read) / sequences if read and sequences else None
