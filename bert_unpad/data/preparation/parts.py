"""Runs that share a preparation: which blocks each of them does, and what they tell each other.

While it is at work, a part renews the time of a file in `work`, its sign of life; when it fails it
says why in another one. So a part that waits for others ends where one of them has failed, was
killed, or does not begin.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bert_unpad._files import read_json_object, write_text

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0  # until another part's failure counts, which may begin again by then
_BEAT_SECONDS = 10.0
_SILENT_SECONDS = 300.0  # without a sign of life; then a part counts as killed
_SHOWN = 8  # parts that a message names

ABSENT_SECONDS = 3600.0
"""How long a part waits for one that has not begun."""


@dataclass(frozen=True)
class Part:
    """One of several runs that share the blocks; number 1 alone does what is done once."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"part: expected 1/n to n/n, got {self}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def file(self, work: Path, what: str) -> Path:
        """The file in `work` that says something of this part."""
        return work / f"{what}-{self.number}-of-{self.count}"

    @property
    def is_first(self) -> bool:
        return self.number == 1

    def mine(self, number: int) -> bool:
        return self.doing(number) == self

    def doing(self, number: int) -> Part:
        """The part that does a block."""
        return Part(number % self.count + 1, self.count)


def to_run(work: Path, blocks: Iterable[int]) -> str:
    """Names the parts that have to do some blocks, or ordered sources, for a message.

    Returns:
        For example "part 2/3 (which has not begun), part 3/3"; "the parts" where it is not known
        how many there are.
    """
    marks = (re.fullmatch(r"begun-(\d+)-of-(\d+)", path.name) for path in work.glob("begun-*"))
    begun = {Part(*map(int, mark.groups())) for mark in marks if mark}
    if len({part.count for part in begun}) != 1:
        return "the parts"
    one = next(iter(begun))
    parts = sorted({one.doing(block) for block in blocks}, key=lambda part: part.number)
    shown = (f"part {part}{' (which has not begun)' * (part not in begun)}" for part in parts)
    return ", ".join([*itertools.islice(shown, _SHOWN), *["..."] * (len(parts) > _SHOWN)])


class OtherParts:
    """What a part tells the others, and hears from them."""

    def __init__(self, work: Path, part: Part) -> None:
        self._work, self._part = work, part
        self._failure = work / f"failed-{part.number}.json"
        self._failure.unlink(missing_ok=True)

    @contextlib.contextmanager
    def told_of_failures(self) -> Iterator[None]:
        """Lets the parts that wait for this one know that it has failed."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            about = {"part": self._part.number, "message": str(error) or type(error).__name__}
            with contextlib.suppress(OSError):
                write_text(self._failure, json.dumps(about))
            raise

    @contextlib.contextmanager
    def told_of_life(self) -> Iterator[None]:
        """Renews the sign of life of this part, from another thread."""
        if self._part.count == 1:
            yield
            return
        sign, ended = self._part.file(self._work, "alive"), threading.Event()
        self._part.file(self._work, "begun").touch()
        sign.touch()

        def renew() -> None:
            while not ended.wait(_BEAT_SECONDS):
                with contextlib.suppress(OSError):
                    sign.touch()

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with contextlib.suppress(OSError):
                sign.unlink()

    def wait_for(
        self, awaited: Callable[[], Part | None], what: str, absent_seconds: float = ABSENT_SECONDS
    ) -> None:
        """Waits until other parts have done something.

        Args:
            awaited: returns one that has not done it; None when all have.
            what: they do.
            absent_seconds: how long to wait for a part that is not at work.

        Raises:
            RuntimeError: another part has failed, the awaited one has not begun or has given no
                sign of life for minutes, or parts of another number work in the same folder.
        """
        if awaited() is None:
            return
        logger.info("waiting until the other parts have finished %s", what)
        begun = time.monotonic()
        signs: dict[Path, tuple[int, float]] = {}  # their times, and when each was first seen
        absent: set[Part] = set()
        with self.told_of_life(), self.told_of_failures():
            while (part := awaited()) is not None:
                waited = time.monotonic() - begun
                if waited >= _PATIENCE_SECONDS:
                    self._check_failures()
                self._check_signs(signs, part)
                if part.file(self._work, "alive") not in signs:
                    if waited > absent_seconds:
                        raise RuntimeError(
                            f"part {part} has not begun within {absent_seconds / 60:g} minutes; "
                            "run it, and this one; where not all parts run at the same time, run "
                            "all with --stage read before any with --stage examples"
                        )
                    if part not in absent:
                        logger.info("part %s is not at work yet: start it", part)
                    absent.add(part)
                time.sleep(_POLL_SECONDS)

    def _check_failures(self) -> None:
        for path in sorted(self._work.glob("failed-*.json")):
            with contextlib.suppress(FileNotFoundError):  # that part has begun again
                failure = read_json_object(path)
                raise RuntimeError(
                    f"part {failure['part']} has failed ({failure['message']}); run it again, and "
                    "this one"
                )

    def _check_signs(self, signs: dict[Path, tuple[int, float]], awaited: Part) -> None:
        now = time.monotonic()
        for path in self._work.glob("alive-*"):
            with contextlib.suppress(FileNotFoundError):  # that part has just ended
                changed, known = path.stat().st_mtime_ns, path in signs
                if known and signs[path][0] == changed:
                    continue
                signs[path] = changed, now
                number, count = path.name.removeprefix("alive-").split("-of-")
                if known and count != str(self._part.count):
                    raise RuntimeError(
                        f"part: expected parts of one number at work in {self._work.parent}, got "
                        f"{self._part} and {number}/{count}; stop those of one number"
                    )
        _, since = signs.get(awaited.file(self._work, "alive"), (0, now))  # or has not begun
        if now - since > _SILENT_SECONDS:
            raise RuntimeError(
                f"part {awaited} has given no sign of life for {_SILENT_SECONDS:g} seconds, "
                "perhaps it was killed; run it again, and this one"
            )
