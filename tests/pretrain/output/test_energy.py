"""The energy of a run, from a made-up powercap folder and a made-up NVML."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from bert_unpad.pretrain import main
from bert_unpad.pretrain.output import energy
from bert_unpad.pretrain.output.energy import EnergyMeter, joules_per_sequence
from bert_unpad.pretrain.output.log import TrainingLog
from tests.support.pretrain_runs import go_back, log_lines, tiny_settings, write_corpus
from tests.support.processes import join_ranks, start_ranks

LIMIT = 1000 * 10**6  # microjoules


def ranks(device: str = "cpu", rank: int = 0, world_size: int = 1, gather=None) -> Any:
    """Ranks as an EnergyMeter knows them; `gather` makes the values of all of one's own."""
    return SimpleNamespace(
        device=torch.device(device),
        rank=rank,
        world_size=world_size,
        is_first_of_node=rank == 0,
        gather=gather or (lambda value: [float(value)]),
    )


def write_zone(root: Path, zone: str, name: str, joules: float, limit: int = LIMIT) -> None:
    folder = root / zone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{round(joules * 1e6)}\n")
    (folder / "max_energy_range_uj").write_text(f"{limit}\n")


@pytest.fixture
def powercap(tmp_path, monkeypatch) -> Path:
    """Two packages with cores and memory, the whole platform, and the first package once more."""
    monkeypatch.setattr(energy, "_POWERCAP", tmp_path)
    write_zone(tmp_path, "intel-rapl:0", "package-0", 100)
    write_zone(tmp_path, "intel-rapl:0:0", "core", 40)
    write_zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    write_zone(tmp_path, "intel-rapl:1", "package-1", 900)
    write_zone(tmp_path, "intel-rapl:2", "psys", 300)
    write_zone(tmp_path, "intel-rapl-mmio:0", "package-0", 100)
    return tmp_path


def advance(root: Path, **joules: float) -> None:
    for zone, value in joules.items():
        (root / zone.replace("_", ":").replace("rapl", "intel-rapl") / "energy_uj").write_text(
            f"{round(value * 1e6)}"
        )


def test_packages_and_memory_count_and_counters_start_again(powercap):
    meter = EnergyMeter(ranks(), None)
    assert meter.missing == {}
    assert meter.joules() == {"gpu": None, "cpu": 0.0}
    advance(powercap, rapl_0=130, rapl_0_0=99, rapl_0_1=14, rapl_1=20, rapl_2=777)
    # 30 and 4, and from 900 over the limit of 1,000 to 20; neither cores nor platform.
    assert meter.joules()["cpu"] == pytest.approx(30 + 4 + 120)
    assert meter.joules()["cpu"] == pytest.approx(154)
    meter.close()


def test_an_earlier_start_of_the_run_counts(powercap):
    meter = EnergyMeter(ranks(), {"gpu": None, "cpu": 1000.5})
    advance(powercap, rapl_0=101)
    assert meter.joules() == {"gpu": None, "cpu": pytest.approx(1001.5)}
    meter.close()
    meter = EnergyMeter(ranks(), {"gpu": None, "cpu": None})
    assert meter.missing == {"cpu": "an earlier start of the run did not read it"}
    assert meter.joules() == {"gpu": None, "cpu": None}
    meter.close()


@pytest.mark.parametrize("problem", ["none", "empty", "no range"])
def test_what_cannot_be_read_is_missing(powercap, problem, monkeypatch):
    if problem == "none":
        monkeypatch.setattr(energy, "_POWERCAP", powercap / "nothing")
    elif problem == "empty":
        (powercap / "intel-rapl:1" / "energy_uj").write_text("")
    else:
        (powercap / "intel-rapl:0" / "max_energy_range_uj").unlink()
    meter = EnergyMeter(ranks(), None)
    assert meter.joules() == {"gpu": None, "cpu": None}
    words = {"none": "there is no zone", "empty": "invalid literal", "no range": "max_energy_range"}
    assert words[problem] in meter.missing["cpu"]
    meter.close()


def test_a_counter_that_fails_later_does_not_end_the_run(powercap):
    meter = EnergyMeter(ranks(), None)
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.joules() == {"gpu": None, "cpu": None}
    assert meter.missing == {"cpu": "its counter could be read at the start only"}
    advance(powercap, rapl_1=950)
    assert meter.joules()["cpu"] is None  # what happened in between is not known
    meter.close()


def test_the_first_rank_of_a_machine_reads_for_all(powercap):
    first = EnergyMeter(ranks(rank=0, world_size=2, gather=lambda x: [float(x), 0.0]), None)
    second = EnergyMeter(ranks(rank=1, world_size=2, gather=lambda x: [1.0, float(x)]), None)
    advance(powercap, rapl_0=107)
    assert first.joules()["cpu"] == pytest.approx(7)
    assert second.missing == {"cpu": "rank 0 cannot read it"}  # which is what it says here
    first.close()
    second.close()


class _NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch) -> SimpleNamespace:
    """A module with one GPU, whose counter is `energy`, in millijoules."""
    fake = SimpleNamespace(NVMLError=_NVMLError, energy=5000, open=0)

    def init() -> None:
        fake.open += 1

    def handle(uuid: str) -> str:
        if uuid != "GPU-1234-ab":
            raise _NVMLError("Not Found")
        return uuid

    def total(gpu: str) -> int:
        assert gpu == "GPU-1234-ab"
        if fake.energy is None:
            raise _NVMLError("Not Supported")
        return fake.energy

    fake.nvmlInit, fake.nvmlShutdown = init, lambda: setattr(fake, "open", fake.open - 1)
    fake.nvmlDeviceGetHandleByUUID, fake.nvmlDeviceGetTotalEnergyConsumption = handle, total
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234-ab")
    )
    return fake


def test_gpus_and_cpus_of_all_ranks(powercap, nvml):
    # Another rank of the machine, whose GPU takes 2 J.
    meter = EnergyMeter(ranks("cuda", 0, 2, lambda x: [float(x), 2.0 if x > 1 else 0.0]), None)
    nvml.energy += 1500
    advance(powercap, rapl_1=901)
    assert meter.joules() == {"gpu": pytest.approx(3.5), "cpu": pytest.approx(1)}
    nvml.energy = None
    assert meter.joules()["gpu"] is None
    assert meter.missing == {"gpu": "its counter could be read at the start only"}
    meter.close()
    assert nvml.open == 0


def test_a_gpu_without_a_counter_or_the_package_is_missing(powercap, nvml, monkeypatch):
    nvml.energy = None
    meter = EnergyMeter(ranks("cuda"), None)
    assert meter.missing == {"gpu": "Not Supported"}
    assert nvml.open == 0
    assert meter.joules() == {"gpu": None, "cpu": 0.0}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "bert_unpad[energy]" in EnergyMeter(ranks("cuda"), None).missing["gpu"]


def test_readers_are_closed_where_another_rank_has_ended(powercap, nvml):
    def gather(value: float) -> list[float]:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        EnergyMeter(ranks("cuda", gather=gather), None)
    assert nvml.open == 0


def test_joules_per_sequence():
    assert joules_per_sequence({"gpu": 30.0, "cpu": 10.0}, 8) == 5.0
    assert joules_per_sequence({"gpu": None, "cpu": 10.0}, 8) == 1.25
    assert joules_per_sequence({"gpu": None, "cpu": None}, 8) is None
    assert joules_per_sequence({"cpu": 10.0}, 0) is None


def _main_on_a_machine_with_rapl(root: Path, arguments: list[str]) -> int:
    """A run between whose readings each package takes 5 J."""
    energy._POWERCAP = root
    note = TrainingLog.note_costs

    def spend_and_note(log: TrainingLog) -> None:
        for file in root.glob("*/energy_uj"):
            file.write_text(str(int(file.read_text()) + 5 * 10**6))
        note(log)

    TrainingLog.note_costs = spend_and_note
    return main(arguments)


def _train(folder: Path, name: str, root: Path) -> tuple[list[dict], dict, str]:
    arguments = ["--config", str(folder / "run.yaml"), "--run_dir", str(folder / name)]
    log = folder / f"{name}.log"
    processes = start_ranks(_main_on_a_machine_with_rapl, 1, root, arguments, log=log)
    assert join_ranks(processes) == []
    output = log.with_name(f"{log.name}.0").read_text()
    assert processes[0].exitcode == 0, output
    summary = json.loads((folder / name / "summary.json").read_text())
    return log_lines(folder / name), summary, output


def test_log_summary_and_report_of_a_run(tmp_path):
    write_corpus(tmp_path, ["kalo", "mitu", "soka"], documents=40)
    values = tiny_settings(
        tmp_path,
        data={"vocab_size": 60},
        batching={"global_batch_size": 4},
        schedule={"total_steps": 4},
        checkpoint={"every": 2, "background": False},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    root = tmp_path / "powercap"
    write_zone(root, "intel-rapl:0", "package-0", 1, 10**12)
    train, summary, output = _train(tmp_path, "whole", root)
    # Read for each line, for the checkpoint after update 2, and twice more at the end.
    assert [line["cpu_joules"] for line in train] == pytest.approx([5, 10, 20, 25])
    assert [line["gpu_joules"] for line in train] == [None] * 4
    assert train[-1]["joules_per_sequence"] == pytest.approx(25 / 16)
    assert summary["joules"] == {"gpu": None, "cpu": pytest.approx(35)}
    assert summary["joules_per_sequence"] == pytest.approx(35 / 16)
    assert summary["energy_missing"] == {}
    assert "CPU 35 J, 2.188 J per sequence" in output
    again = go_back(tmp_path, "whole", 2)
    train, summary, _ = _train(tmp_path, again, root)
    assert [line["cpu_joules"] for line in train] == pytest.approx([5, 10, 20, 25])
    assert summary["joules"]["cpu"] == pytest.approx(35)
    # The rest of the run on a machine that cannot be read.
    again = go_back(tmp_path, "whole", 2, "elsewhere")
    train, summary, output = _train(tmp_path, again, tmp_path / "nothing")
    assert train[-1]["cpu_joules"] is None
    assert summary["joules"] == {"gpu": None, "cpu": None}
    assert summary["joules_per_sequence"] is None
    assert "there is no zone of RAPL" in summary["energy_missing"]["cpu"]
    assert "CPU not read: there is no zone of RAPL" in output
    assert not math.isnan(summary["sequences"])
