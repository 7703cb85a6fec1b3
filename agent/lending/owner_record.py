"""The record of what the owner of a machine lends: `lending.json` in the machine's state folder.

It survives restarts of the agent and of the machine. New work is refused according to this record, and it is written
before any task is stopped.
"""

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent import records
from agent.lending.hours import LendingHours
from agent.record_files import read_json

WORD = "word.json"
"""The file with the owner's commands while the agent did not answer (`agent.lending.owner_request`)."""

_WRITE_S = 0.5
"""The longest time that a write of the record delays the stop of tasks."""


@dataclass(frozen=True)
class OwnerRecord:
    """What the owner has taken back. Times are seconds since the epoch."""

    machine_at_s: float | None = None
    """From when the whole machine is the owner's; None: it is lent, except `gpus_at_s`."""
    by_hours: bool = False
    """Whether the lending hours have taken the machine, and will lend it again, not the owner."""
    gpus_at_s: Mapping[int, float] = field(default_factory=dict)
    """The GPUs that the owner has taken back while the rest of the machine is lent, each with the time from when."""
    hours: LendingHours | None = None
    """When the machine is lent; None: always."""
    given_gpu_s: float = 0.0
    """GPU seconds that tasks have used on this machine."""
    said_at_s: float = 0.0
    """When the owner, or the lending hours, have last taken or lent something. 0: never."""

    @property
    def is_whole(self) -> bool:
        """Whether the owner has taken back the whole machine, now or from a time that is announced."""
        return self.machine_at_s is not None

    @property
    def withheld(self) -> int:
        """The mask of the single GPUs that the owner has taken back."""
        return sum(1 << gpu for gpu in self.gpus_at_s)

    def refuses(self, slots: Iterable[int]) -> bool:
        """Returns whether the owner has taken back the machine or one of these GPU slots: no task may start on them."""
        return self.is_whole or any(slot in self.gpus_at_s for slot in slots)

    def due_s(self, slots: Iterable[int]) -> float | None:
        """Returns when the owner takes the resources of a task with these GPU slots; None: they stay lent."""
        times = [self.gpus_at_s[slot] for slot in slots if slot in self.gpus_at_s]
        return min([*times, *([] if self.machine_at_s is None else [self.machine_at_s])], default=None)

    def taking(self, gpus: frozenset[int] | None, at_s: float, *, by_hours: bool = False) -> "OwnerRecord":
        """Returns the record after the owner takes GPUs back; None: the whole machine. An earlier time stays."""
        if gpus is None:
            before_s = math.inf if self.machine_at_s is None else self.machine_at_s
            by_hours = by_hours and (self.machine_at_s is None or self.by_hours)
            return replace(self, machine_at_s=min(at_s, before_s), by_hours=by_hours)
        taken = {gpu: min(at_s, self.gpus_at_s.get(gpu, math.inf)) for gpu in gpus}
        return replace(self, gpus_at_s={**self.gpus_at_s, **taken})

    def with_word(self, said: "OwnerRecord") -> "OwnerRecord":
        """Returns the record after the command `said` of the owner (`agent.lending.owner_request`)."""
        found = self if said.machine_at_s is None else self.taking(None, said.machine_at_s)
        for gpu, at_s in said.gpus_at_s.items():
            found = found.taking(frozenset({gpu}), at_s)
        return found

    def lending_machine(self) -> "OwnerRecord":
        """Returns the record after the machine is lent again, except single GPUs that the owner has taken."""
        return replace(self, machine_at_s=None, by_hours=False)

    def lending(self, gpus: frozenset[int] | None, count: int) -> "OwnerRecord":
        """Returns the record after the owner lends `gpus` of the machine's `count` GPUs; None: all of them."""
        if gpus is None:
            return replace(self, machine_at_s=None, by_hours=False, gpus_at_s={})
        kept = dict(self.gpus_at_s)
        if self.machine_at_s is not None:
            kept = dict.fromkeys(range(count), self.machine_at_s) | kept
        left = {gpu: at_s for gpu, at_s in kept.items() if gpu not in gpus}
        return replace(self, machine_at_s=None, by_hours=False, gpus_at_s=left)

    def to_json(self) -> dict[str, Any]:
        """Returns the record as values of JSON."""
        return {
            "machine_at_s": self.machine_at_s,
            "by_hours": self.by_hours,
            "gpus_at_s": {str(gpu): at_s for gpu, at_s in self.gpus_at_s.items()},
            "hours": None if self.hours is None else self.hours.text,
            "given_gpu_s": self.given_gpu_s,
            "said_at_s": self.said_at_s,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "OwnerRecord":
        """Returns the record from the result of `to_json`."""
        at_s, hours = body["machine_at_s"], body["hours"]
        found = cls(
            None if at_s is None else float(at_s),
            bool(body["by_hours"]),
            {int(gpu): float(at_s) for gpu, at_s in body["gpus_at_s"].items()},
            None if hours is None else LendingHours.parse(hours),
            float(body["given_gpu_s"]),
            float(body["said_at_s"]),
        )
        times = (found.machine_at_s or 0.0, found.given_gpu_s, found.said_at_s, *found.gpus_at_s.values())
        if not all(map(math.isfinite, times)):
            raise ValueError(f"times {times}: must be finite")
        return found


class LendingFile:
    """The file with the record. The space for the next version is reserved, so that a full disk cannot prevent it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lending.json"

    def read(self) -> OwnerRecord:
        """Returns the record. Without a file, everything is lent.

        Raises:
            OSError, ValueError, KeyError, TypeError, AttributeError: the file is unreadable or damaged. Whether the
                owner lends is then unknown.
        """
        body = read_json(self._path)
        return OwnerRecord() if body is None else OwnerRecord.from_json(body)

    def reserve(self) -> None:
        """Reserves the disk space for the next `write`, and for a word (`agent.lending.owner_request`)."""
        records.reserve(str(self._path))
        if not self._path.with_name(f"{WORD}.reserve").exists():
            records.reserve(str(self._path.with_name(WORD)))

    def write(self, lending: OwnerRecord) -> None:
        """Writes the record durably.

        Raises:
            OSError: the disk failed.
        """
        write_record(self._path, lending)


def write_record(path: Path, lending: OwnerRecord) -> None:
    """Writes a record durably, into the reserved space if it fits.

    Raises:
        OSError: the disk failed.
    """
    body = lending.to_json()
    fits = len(json.dumps(body)) <= records.RESERVED_BYTES
    (records.write_reserved if fits else records.write_durably)(str(path), body)


async def in_time(act: Callable[[], None], patience_s: float = _WRITE_S) -> bool:
    """Runs an access to the disk in a thread. Returns whether it ended within `patience_s`; otherwise it continues."""
    acting = asyncio.ensure_future(asyncio.to_thread(act))
    await asyncio.wait({acting}, timeout=patience_s)
    return acting.done()
