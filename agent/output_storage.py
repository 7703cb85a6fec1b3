"""Stores the outputs of ended tasks in the region's bucket (`domain.output_manifest`).

A process with the task's user reads each output (`agent.output_reader`), and this one, which has the credentials,
uploads it in parts and then writes the manifest. An agent that is killed meanwhile leaves no manifest; the next one
begins the output again, because the file `outputs.json` of the task is missing.
"""

import asyncio
import hashlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from agent import output_reader, records
from agent.launch import Owner
from agent.record_files import read_sound
from agent.state import AttemptFolder
from agent.tasks import RunFolder
from domain import ids
from domain.output_manifest import MAX_TEXT, PART_BYTES, OutputManifest, OutputPart
from domain.task_reports import UnstoredOutput
from mizzen.objects import ObjectStore

PATIENCE_S = 300.0
"""If no part was stored for this time, the end of a workload no longer waits for its outputs."""
_TRIES = 3
"""Number of tries to read an output that changes meanwhile."""
_LONGEST_PAUSE_S = 30.0
_log = logging.getLogger(__name__)


class _Closing(Exception):
    """Raised because the agent ends."""


@dataclass
class _Storing:
    """The outputs of one task that are being stored."""

    run: RunFolder
    outputs: Mapping[str, str]
    open_store: Callable[[], ObjectStore]
    owner: Owner | None
    error: str = ""
    """The last error of the store."""
    moved_s: float = field(default_factory=time.monotonic)
    """When the last part was stored."""
    is_late: bool = False
    """Whether the end of the attempt no longer waits for it."""


class OutputStorage:
    """Stores the outputs of the runs passed to `watch`, with one asyncio task per run."""

    def __init__(self, limit_bytes: int, limit_files: int) -> None:
        """The limits are those of one output of one task."""
        self._limits = {"bytes": limit_bytes, "files": limit_files}
        # Outputs have their own threads, so that large ones do not delay the shipping of logs or the start of tasks.
        self._executor = ThreadPoolExecutor(4, thread_name_prefix="outputs")
        self._closing = threading.Event()
        self._storing: dict[str, tuple[_Storing, asyncio.Task[None]]] = {}

    def watch(
        self,
        run: RunFolder,
        outputs: Mapping[str, str],
        open_store: Callable[[], ObjectStore],
        owner: Owner | None,
    ) -> None:
        """Starts to store the outputs of a run that has ended, by name. `owner` is the user of its task. Idempotent."""
        if not outputs or run.run_id in self._storing or is_stored(run):
            return
        one = _Storing(run, outputs, open_store, owner)
        task = asyncio.create_task(self._store(one), name=f"outputs of {run.run_id}")
        self._storing[run.run_id] = one, task
        task.add_done_callback(lambda _: self._storing.pop(run.run_id, None))

    async def until_stored(self, runs: Sequence[RunFolder], patience_s: float = PATIENCE_S) -> None:
        """Waits until the outputs of the runs are stored, or until none has made progress for `patience_s`."""
        while found := [self._storing[run.run_id] for run in runs if run.run_id in self._storing]:
            left_s = max(one.moved_s for one, _ in found) + patience_s - time.monotonic()
            if left_s <= 0:
                for one, _ in found:
                    one.is_late = True
                return
            await asyncio.wait([task for _, task in found], timeout=left_s)

    def unstored(self, run: RunFolder) -> list[UnstoredOutput]:
        """Returns the outputs of a run that could not be stored, with the reasons.

        Outputs that are still being stored are among them only after `until_stored` has given up waiting for them.
        """
        if (body := read_sound(run.path / _FILE)) is not None:
            return [UnstoredOutput(name, *found) for name, found in body.items()]
        one = self._storing[run.run_id][0] if run.run_id in self._storing else None
        if one is None or not one.is_late:
            return []
        why = f"it could not be uploaded yet, and the agent keeps trying: {one.error or 'no answer'}"
        return [UnstoredOutput(name, why) for name in one.outputs]

    async def close(self) -> None:
        """Stops storing. The next agent begins again with outputs that were not finished."""
        self._closing.set()
        tasks = [task for _, task in self._storing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _store(self, one: _Storing) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        while not is_stored(one.run):
            try:
                await loop.run_in_executor(self._executor, self._store_all, one)
            except _Closing:
                return
            except Exception as error:
                one.error = str(error) or type(error).__name__
                pause_s = min(_LONGEST_PAUSE_S, 2.0**failures)
                failures += 1
                _log.warning("outputs of %s cannot be stored, next try in %.0f s: %r", one.run.run_id, pause_s, error)
                await asyncio.sleep(pause_s)

    def _store_all(self, one: _Storing) -> None:
        store, run = one.open_store(), one.run
        problems = {}
        for name, path in one.outputs.items():
            why, is_missing = self._store_one(store, one, name, path)
            if why:
                problems[name] = why, is_missing
                _log.info("output %s of %s is not stored: %s", name, run.run_id, why)
        records.write_durably(str(run.path / _FILE), problems)

    def _store_one(self, store: ObjectStore, one: _Storing, name: str, path: str) -> tuple[str, bool]:
        """Stores one output; returns why it is not stored, and whether it does not exist."""
        run = one.run
        place = (run.workload_id, run.attempt, run.job, run.task, name)
        key = ids.output_manifest_key(*place)
        if store.size(key) is not None:  # Another agent was killed after it.
            return OutputManifest.model_validate_json(store.get(key)).error, False
        for _ in range(_TRIES):
            parts, said = self._read(store, one, place, path)
            if said.get("kind") != output_reader.CHANGED:
                break
        error = f"{path} {said['error']}" if "error" in said else ""
        if error:
            for number in range(len(parts)):
                store.delete(ids.output_part_key(*place, number))
            if said["kind"] == output_reader.MISSING:
                return error, True
            parts = []
        found = {name: said[name] for name in ("files", "size_bytes", "left_out", "left_out_count") if name in said}
        error = error[:MAX_TEXT]
        manifest = OutputManifest(path=path, stored_at_s=time.time(), error=error, parts=parts, **found)
        store.put(key, manifest.model_dump_json().encode())
        if not error:
            _forget_older(store, run, name)
        return error, False

    def _read(
        self, store: ObjectStore, one: _Storing, place: tuple[str, int, str, int, str], path: str
    ) -> tuple[list[OutputPart], dict[str, Any]]:
        """Stores the parts of an output; returns them, and the final message of the reader process."""
        owner = one.owner
        user = owner and {"uid": owner.uid, "gid": owner.gid, "groups": owner.groups}
        argv = [sys.executable, "-I", output_reader.__file__, str(one.run.work), path]
        argv += [json.dumps(self._limits), json.dumps(user)]
        parts: list[OutputPart] = []
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/"
        ) as reader:
            try:
                assert reader.stdout is not None and reader.stderr is not None
                while piece := reader.stdout.read(PART_BYTES):
                    if self._closing.is_set():
                        raise _Closing
                    store.put(ids.output_part_key(*place, len(parts)), piece)
                    parts.append(OutputPart(size_bytes=len(piece), sha256=hashlib.sha256(piece).hexdigest()))
                    one.moved_s = time.monotonic()
                said = reader.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            except BaseException:
                reader.kill()
                raise
        if reader.returncode != 0:
            failed = f"could not be read: status {reader.returncode}: {said[:500]}"
            return parts, {"kind": output_reader.CHANGED, "error": failed}
        body: dict[str, Any] = json.loads(said)
        return parts, body


_FILE = "outputs.json"
"""File in a task's folder once its outputs are done: why outputs, by name, were not stored, and which are missing."""


def is_stored(run: RunFolder) -> bool:
    """Whether the outputs of a run for which `OutputStorage.watch` was called are complete."""
    return (run.path / _FILE).exists()


def has_outputs(attempt: AttemptFolder) -> bool:
    """Whether outputs of the attempt's tasks, which have ended, are still to be stored."""
    try:
        launch = attempt.launch()
    except (OSError, ValueError):  # Without the description, its outputs are unknown.
        return False
    ends = [] if launch is None or not launch.outputs else [(run, run.exit()) for run in attempt.runs()]
    return any(end is not None and end.started and not is_stored(run) for run, end in ends)


def _forget_older(store: ObjectStore, run: RunFolder, name: str) -> None:
    """Deletes the output of older attempts, because only the last one counts. The rest is deleted with the workload."""
    newest = ids.output_manifest_key(run.workload_id, run.attempt, run.job, run.task, name)
    manifests = newest.rpartition("/")[0] + "/"
    part = ids.output_part_key(run.workload_id, run.attempt, run.job, run.task, name, 0)
    parts = part.rsplit("/", 2)[0] + "/"
    try:
        for prefix in (manifests, parts):
            for info in list(store.list(prefix)):
                attempt = info.key.removeprefix(prefix).partition("/")[0].partition(".")[0]
                if attempt.isdigit() and int(attempt) < run.attempt:
                    store.delete(info.key)
    except Exception as error:  # The new output is stored.
        _log.warning("older outputs of %s cannot be deleted now: %r", run.run_id, error)
