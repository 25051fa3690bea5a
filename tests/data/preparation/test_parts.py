"""Parts: what they tell each other, and whom they wait for."""

import multiprocessing
import os
import signal
import threading
import time

import pytest

from bert_unpad.data.preparation import parts
from bert_unpad.data.preparation import pipeline as stages
from bert_unpad.data.preparation.join import join_parts
from bert_unpad.data.preparation.parts import OtherParts, Part
from tests.support.pipelines import child, pipeline
from tests.support.prepared_text import contents
from tests.support.processes import SLOWNESS, TIMEOUT


def test_three_parts_one_after_the_other(corpus, expected, tmp_path):
    output = tmp_path / "out"
    parts = [pipeline(corpus, output, part=Part(number, 3)) for number in (2, 3, 1)]
    for part in parts[:2]:
        part.read()
    with pytest.raises(ValueError, match="stage: expected all parts to have read"):
        parts[0].plan_with_others(wait=False)
    parts[2].read()
    for part in parts[:2]:
        part.plan_with_others(wait=False)
        part.make_examples()
    with pytest.raises(
        ValueError, match=r"output: expected \d+ finished blocks of train .*missing"
    ):
        join_parts(output)
    parts[2].make_examples()
    statistics = join_parts(output)
    assert join_parts(output) == statistics
    assert contents(output) == contents(expected)


def test_parts_that_wait_for_each_other(corpus, expected, tmp_path):
    processes = [child(corpus, tmp_path / "out", Part(number, 3)) for number in (3, 2, 1)]
    for process in processes:
        process.join(TIMEOUT)
        assert process.exitcode == 0
    join_parts(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(expected)


def test_parts_do_not_wait_for_one_that_has_failed(corpus, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_PATIENCE_SECONDS", 0.0)
    first, second = (pipeline(corpus, tmp_path / "out", part=Part(n, 2)) for n in (1, 2))
    second.read()
    with monkeypatch.context() as patch:
        patch.setattr(first, "_engine", None)
        with pytest.raises(AttributeError):
            first.read()
    with pytest.raises(RuntimeError, match=r"part 1 has failed .*'run'.*; run it again, and this"):
        second.plan_with_others(wait=True)
    first, second = (pipeline(corpus, tmp_path / "out", part=Part(n, 2)) for n in (1, 2))
    first.read()
    for part in (first, second):
        part.plan_with_others(wait=True)
        part.make_examples()
    join_parts(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(expected)


def at_work(work, part, connection):
    with OtherParts(work, part).told_of_life():
        connection.send("begins")
        connection.recv()


def test_parts_do_not_wait_for_one_that_was_killed(corpus, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(parts, "_POLL_SECONDS", 0.1)
    first = pipeline(corpus, tmp_path / "out", part=Part(1, 3))
    first.read()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=at_work, args=(first.build.work, Part(2, 3), theirs))
    process.start()
    assert ours.poll(TIMEOUT)
    os.kill(process.pid, signal.SIGKILL)
    process.join(TIMEOUT)
    message = "part 2/3 has given no sign of life for 1 seconds, perhaps it was killed; run it"
    with pytest.raises(RuntimeError, match=message):
        first.plan_with_others(wait=True)
    third = pipeline(corpus, tmp_path / "out", part=Part(3, 3))
    monkeypatch.setattr(parts, "_PATIENCE_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match=f"part 1 has failed .{message}"):
        third.plan_with_others(wait=True)
    for number in (3, 2, 1):
        pipeline(corpus, tmp_path / "out", part=Part(number, 3)).read()
    pipeline(corpus, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(expected)


def test_parts_wait_for_one_that_is_slow(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_SILENT_SECONDS", SLOWNESS)
    monkeypatch.setattr(parts, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(parts, "_BEAT_SECONDS", 0.1)
    first, second = (pipeline(corpus, tmp_path / "out", part=Part(n, 2)) for n in (1, 2))
    first.read()

    def slow():
        with OtherParts(second.build.work, Part(2, 2)).told_of_life():
            time.sleep(2.5 * SLOWNESS)
            second.read()

    thread = threading.Thread(target=slow)
    thread.start()
    first.plan_with_others(wait=True)
    thread.join(TIMEOUT)
    assert first._is_planned()
    assert not list(first.build.work.glob("alive-*"))


def test_parts_of_another_number_are_refused(corpus, tmp_path, monkeypatch):
    for name in ("_POLL_SECONDS", "_BEAT_SECONDS"):
        monkeypatch.setattr(parts, name, 0.05)
    first = pipeline(corpus, tmp_path / "out", part=Part(1, 2))
    first.read()
    (first.build.work / "alive-1-of-5").touch()  # of an earlier run that was killed
    with (
        OtherParts(first.build.work, Part(2, 3)).told_of_life(),
        pytest.raises(RuntimeError, match=r"part: expected parts of one number .*1/2 and 2/3"),
    ):
        first.plan_with_others(wait=True)


def test_a_part_that_does_not_begin_is_named(corpus, expected, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(parts, "_POLL_SECONDS", 0.05)
    output = tmp_path / "out"
    first, second, third = (pipeline(corpus, output, part=Part(n, 3)) for n in (1, 2, 3))
    first.read()
    third.read()
    message = "part 2/3 has not begun within 0.005 minutes; run it, and this one"
    with pytest.raises(RuntimeError, match=message):
        first.plan_with_others(wait=True, absent_seconds=0.3)
    assert "part 2/3 is not at work yet: start it" in caplog.text
    to_run = r"run part 2/3 \(which has not begun\)"
    with pytest.raises(ValueError, match=f"expected all parts to have read .*; {to_run} with"):
        third.plan_with_others(wait=False)
    with pytest.raises(ValueError, match=f"parts that have read all of .*; {to_run} to the end"):
        join_parts(output)
    second.read()
    with pytest.raises(ValueError, match=r"read all of .*; run part 1/3 to the end"):
        join_parts(output)
    first.plan_with_others(wait=True)
    for part in (first, third):
        part.make_examples()
    with pytest.raises(ValueError, match=r"missing: \d+.*; run part 2/3 to the end"):
        join_parts(output)
    second.make_examples()
    join_parts(output)
    assert contents(output) == contents(expected)


def test_parts_that_are_to_run(tmp_path):
    assert parts.to_run(tmp_path, [3, 4]) == "the parts"
    for number in (1, 12):
        Part(number, 20).file(tmp_path, "begun").touch()
    assert parts.to_run(tmp_path, [11, 31]) == "part 12/20"
    names = [f"part {n}/20{' (which has not begun)' * (n > 1)}" for n in range(1, 9)]
    assert parts.to_run(tmp_path, range(1000)) == ", ".join([*names, "..."])
    Part(1, 3).file(tmp_path, "begun").touch()
    assert parts.to_run(tmp_path, [3]) == "the parts"


def test_an_interrupted_part_says_so(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_PATIENCE_SECONDS", 0.0)
    first, second = (pipeline(corpus, tmp_path / "out", part=Part(n, 2)) for n in (1, 2))

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "spool_block", stop)
    with pytest.raises(KeyboardInterrupt):
        first.read()
    with pytest.raises(RuntimeError, match=r"part 1 has failed \(KeyboardInterrupt\)"):
        second.plan_with_others(wait=True)


def test_parts_at_once_plan_once(corpus, tmp_path, monkeypatch):
    parts = [pipeline(corpus, tmp_path / "out", part=Part(n, 3)) for n in (1, 2, 3)]
    for part in parts:
        part.read()
    trained, train = [], stages.train_tokenizer
    monkeypatch.setattr(
        stages, "train_tokenizer", lambda *given: trained.append(given) or train(*given)
    )
    threads = [threading.Thread(target=part.plan_with_others, args=(False,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(trained) == 1
    assert all(part._is_planned() for part in parts)
