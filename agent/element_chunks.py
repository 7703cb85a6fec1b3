"""The agent's side of a runner: hands chunks of array elements to its shim (`agent.lane`), and reads results."""

import contextlib
import json
from collections.abc import Collection, Sequence
from signal import SIGUSR1
from typing import Any

from agent import records, tasks
from agent.lane import ALL, CANCELLED, CHUNK, JOURNAL
from agent.launch import DEFAULT_PATH, script_command
from agent.record_files import read_json, read_sound
from agent.staged import StagedAttempt
from agent.state import AttemptFolder
from agent.tasks import RunFolder, TaskState
from domain.array_elements import fill, values_of, variables_of
from domain.ids import array_of, element_id
from domain.launch import LaunchDescription
from domain.protocol.leases import ElementResult, LeasedElement

_RESERVED = ("MIZZEN_CHECKPOINT_URI",)
"""Variables of the runner that its elements do not get, because files saved there would belong to no element."""


def lane_of(launch: LaunchDescription) -> dict[str, Any] | None:
    """Returns the settings of a runner's lane for its shim; None: the attempt is not one of a runner."""
    if launch.elements is None or launch.elements.runners is None:
        return None
    return {"interrupt": launch.elements.runners.interrupt, "max_runtime_s": launch.max_runtime_s}


class ElementChunk:
    """A chunk of elements of a runner's attempt. Its methods block for milliseconds."""

    def __init__(self, folder: AttemptFolder, elements: Sequence[LeasedElement]) -> None:
        self._folder = folder
        self._elements = elements
        self._keys = {(one.index, one.attempt) for one in elements}
        self._handed = False
        self._read_bytes = 0
        self._results: dict[tuple[int, int], ElementResult] = {}

    def hand_over(self, staged: StagedAttempt) -> bool:
        """Gives the elements to the lane, if it runs and does not have them. Returns whether it has them."""
        run = staged.runs[0]
        identities = run.identities()
        if not self._handed and identities is not None and tasks.inspect(run) is TaskState.RUNNING:
            body = {"elements": [_element(staged, run, one) for one in self._elements]}
            if read_sound(run.path / CHUNK) != body:  # An earlier agent may have written it.
                records.write_durably(str(run.path / CHUNK), body)
            identities[0].send(SIGUSR1)
            self._handed = True
        return self._handed

    def is_done(self) -> bool:
        """Returns whether all elements have ended."""
        found = self.results()
        return len(found) == len(self._keys) > 0 and all(one.ended_s is not None for one in found)

    def is_over(self) -> bool:
        """Returns whether the attempt has ended on this machine, or was stopped before it ran."""
        runs = self._folder.runs()
        return bool(runs) and all(tasks.inspect(run) in (TaskState.ENDED, TaskState.LOST) for run in runs)

    def results(self) -> list[ElementResult]:
        """Returns the known results of the elements."""
        for run in self._folder.runs():
            self._read_bytes = _read(run, self._keys, self._results, self._read_bytes)
        return list(self._results.values())


def known_results(folder: AttemptFolder) -> list[ElementResult]:
    """Returns the known results of the last chunk of an attempt that has ended; empty: it had no chunk.

    An element without an entry in the journal was not started.
    """
    found = []
    for run in folder.runs():
        chunk = read_sound(run.path / CHUNK)
        if chunk is not None and run.exit() is not None:
            keys = [(one["index"], one["attempt"]) for one in chunk.get("elements", ())]
            known: dict[tuple[int, int], ElementResult] = {}
            _read(run, keys, known, 0)
            found += [known.get(key) or ElementResult(*key) for key in keys]
    return found


def cancel(folder: AttemptFolder, indexes: Sequence[int]) -> None:
    """Lets the lane of an attempt stop or skip elements; all of them if `indexes` is empty."""
    for run in folder.runs():
        path = run.path / CANCELLED
        known: list[int | str] = read_json(path) or []
        records.write_durably(str(path), json.dumps([*known, *indexes] if indexes else [ALL]).encode())
        identities = run.identities()
        if identities is not None and tasks.inspect(run) is TaskState.RUNNING:
            identities[0].send(SIGUSR1)


def _element(staged: StagedAttempt, run: RunFolder, leased: LeasedElement) -> dict[str, Any]:
    """Returns the lane's parameters for starting an element, with the element's values filled in."""
    launch, job = staged.launch, staged.launch.jobs[run.job]
    assert launch.elements is not None
    array = array_of(run.workload_id)
    values = values_of(launch.elements, leased.index)
    env: dict[str, str | None] = {name: fill(value, values) for name, value in job.env.items() if "{{" in value}
    env |= variables_of(array, values)
    env |= {"MIZZEN_WORKLOAD": element_id(array, leased.index), "MIZZEN_ATTEMPT": str(leased.attempt)}
    env |= dict.fromkeys(_RESERVED)
    script = None if job.script is None or "{{" not in job.script else fill(job.script, values)
    argv = [fill(word, values) for word in job.argv] if any("{{" in word for word in job.argv) else None
    if script is not None:
        argv = list(script_command(script, run.script, f"{job.env.get('PATH', DEFAULT_PATH)}:{DEFAULT_PATH}"))
    return {"index": leased.index, "attempt": leased.attempt, "argv": argv, "script": script, "env": env}


def _read(
    run: RunFolder, keys: Collection[tuple[int, int]], found: dict[tuple[int, int], ElementResult], start: int
) -> int:
    """Adds the journal's entries about the elements `keys` from an offset on to `found`; returns the next offset."""
    try:
        with open(run.path / JOURNAL, "rb") as file:
            file.seek(start)
            text = file.read()
    except FileNotFoundError:
        return start
    whole = text.rfind(b"\n") + 1
    for line in text[:whole].splitlines():
        with contextlib.suppress(ValueError, TypeError):  # Damaged by a crash of the machine.
            one = ElementResult(**json.loads(line))
            if (one.index, one.attempt) in keys:
                found[one.index, one.attempt] = one
    return start + whole
