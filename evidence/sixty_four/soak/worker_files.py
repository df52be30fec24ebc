"""What the ranks of the soak have written down, read a part at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evidence.steering.timeline import epoch_of

TIME = "UNICKPT_SOAK_TIME"  # in the environment: seconds since 1970 at the beginning of the monotonic clock


class _Lines:
    """New whole lines of a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[str]:
        """Return the lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode().splitlines()


class Worked:
    """The events of all ranks."""

    def __init__(self, folder: Path) -> None:
        self._lines, self._events = _Lines(folder / "events.jsonl"), list[dict[str, Any]]()

    def events(self) -> list[dict[str, Any]]:
        """Return all events."""
        self._events += map(json.loads, self._lines.new())
        return self._events


Line = tuple[int, int, int, str, float]  # step, loss, words, state, time


class Steps:
    """The steps of all rounds."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder / "steps", dict[str, _Lines]()
        self.rounds: dict[str, list[Line]] = {}

    def read(self) -> Mapping[str, list[Line]]:
        """Return the steps of each round, in the order of the rounds."""
        for path in self._folder.glob("*.jsonl"):
            if "-" not in path.stem:  # those of ``Observed`` have a rank
                lines = self._files.setdefault(path.stem, _Lines(path)).new()
                self.rounds.setdefault(path.stem, []).extend(tuple(json.loads(line)) for line in lines)
        self.rounds = dict(sorted(self.rounds.items(), key=lambda each: epoch_of(each[0])))
        return self.rounds

    def newest(self) -> tuple[str, float] | None:
        """Return the newest round that has done a step, and when it did its last one."""
        done = [(name, lines[-1][4]) for name, lines in self.read().items() if lines]
        return done[-1] if done else None

    def last(self) -> int:
        """Return the newest step of the newest round."""
        done = [lines[-1][0] for lines in self.read().values() if lines]
        return done[-1] if done else 0


_KNOWN: dict[Path, Steps] = {}


def read_steps(folder: Path) -> Steps:
    """Return the steps of a job."""
    if folder not in _KNOWN:
        _KNOWN.clear()  # of earlier jobs
        _KNOWN[folder] = Steps(folder)
    return _KNOWN[folder]
