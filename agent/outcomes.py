"""Determines from the folders how an attempt's tasks on this machine ended, and stores the outcome beyond the folders.

A workflow may request the outcome long after the tasks have ended, for example because Temporal was unavailable or lost
its state. Finished work must not be repeated then, so exit statuses are kept much longer than logs and working
directories.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agent import records
from agent.disk import disk_report
from agent.record_files import DamagedRecord
from agent.sealed import CannotUnseal, unseal
from agent.secret_masks import Masker
from agent.state import AttemptFolder, StateFolder
from agent.task_progress import read_progress
from agent.task_readiness import never_ready
from agent.tasks import ReportedExit, RunFolder
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome, TaskExit
from domain.task_reports import OWNER, LeftFiles, NoticeReport
from mizzen.notices import Kind

_MOST_ENTRIES = 100_000
"""Maximum number of entries of a working directory that are counted."""


def left_by(run: RunFolder, machine: str, keep_s: float) -> LeftFiles | None:
    """Returns the files that an ended task has left, with the time until which they are kept; None: there are none.

    Counts files that were written since the start of the task. Hidden files and folders are caches and settings, and
    are left out. `keep_s` is the time for which the folder is kept after the end, in seconds.
    """
    began_s, end = run.started_at_s(), run.exit()
    if began_s is None or end is None:
        return None
    size = _written_since(run.work, began_s)
    return LeftFiles(machine, str(run.work), size, end.ended_at_s + keep_s) if size else None


def _written_since(root: Path, began_s: float) -> int:
    total, seen, ahead = 0, 0, [str(root)]
    while ahead:
        try:
            with os.scandir(ahead.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if seen > _MOST_ENTRIES:
                        return total
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        # A copy may keep the time of modification of its source, but it has a time of change.
                        total += status.st_size if status.st_ctime >= began_s else 0
        except OSError:  # The folder was removed, or is not readable.
            continue
    return total


_OUTCOME = TypeAdapter(NodeOutcome)


def outcome(machine: str, runs: Sequence[RunFolder], masker: Masker | None) -> NodeOutcome:
    """Returns the outcome of `runs`. Exits are sorted by the time at which the tasks ended, so the first failure is
    first; tasks that have not ended have no exit.

    `masker` has the same meaning as in `agent.task_progress.read_progress`.
    """
    ends = [run.exit() for run in runs]
    ended = [(run, end) for run, end in zip(runs, ends, strict=True) if end is not None]
    stops = [(run.stop(), end) for run, end in zip(runs, ends, strict=True)]
    # A task may end by itself while a stop is being sent. It has finished its work, so it does not count as stopped.
    noticed = [stop for stop, end in stops if stop is not None and (end is None or end.noticed)]
    told = any(stop.told for stop in noticed)
    # After a notice that the agent gave by itself, exit code 0 is no success either, and there is no failure to report.
    told = told or (bool(noticed) and all(end is not None and end.succeeded for end in ends))
    progress = [read_progress(run, masker) for run in runs]
    # From the record of the stop, because the agent may have been stopped or dead (`agent.lending.emergency_reclaim`).
    owner = any(stop.owner for stop in noticed)
    notices = (p.notice for p in progress if p.notice is not None and p.notice.takes_machine)
    return NodeOutcome(
        machine=machine,
        exits=[
            TaskExit(
                run.job,
                run.task,
                end.exit_code,
                end.signal,
                memory_limit_bytes=end.memory_limit_bytes,
                memory_peak_bytes=end.memory_peak_bytes,
                in_setup=end.in_setup,
                restarts=end.restarts,
                not_ready=never_ready(run) if end.noticed else None,
                disk=disk_report(run) if end.noticed or not end.succeeded else None,
            )
            for run, end in sorted(ended, key=lambda pair: (pair[1].ended_at_s, pair[0].job, pair[0].task))
            if end.started
        ],
        progress=progress,
        stopped=told or not all(end is not None and end.started for end in ends),
        notice=_owners_notice(ended) if owner else next(notices, None),
    )


def _owners_notice(ended: Sequence[tuple[RunFolder, ReportedExit]]) -> NoticeReport:
    at_s = min((end.ended_at_s for _, end in ended), default=time.time())
    return NoticeReport(OWNER, str(Kind.PREEMPT), True, at_s, at_s, "the owner took the machine back, or GPUs of it")


def keep_outcome(state: StateFolder, attempt: AttemptFolder, machine: str) -> None:
    """Stores the outcome of an attempt on `machine` if all its tasks there have ended."""
    try:
        launch = attempt.launch()
    except DamagedRecord:  # Without the description, the attempt's tasks are unknown.
        return
    if launch is None:
        return
    runs = [attempt.run(place.job, place.task) for place in launch.on_machine(machine)]
    if runs and all(run.exit() is not None for run in runs):
        body = _OUTCOME.dump_python(outcome(machine, runs, _masker(state, launch, machine)), mode="json")
        records.write_durably(str(_file(state, attempt.key)), body)


def kept_outcome(state: StateFolder, key: str) -> NodeOutcome | None:
    """Returns the stored outcome of an attempt (`workload.attempt`), or None if it is missing or unreadable."""
    try:
        return _OUTCOME.validate_json(_file(state, key).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _masker(state: StateFolder, launch: LaunchDescription, machine: str) -> Masker | None:
    try:
        return Masker.of(unseal(state.private_keys(), launch.sealed_secrets.get(machine)))
    except CannotUnseal:
        return None


def forget_outcomes(state: StateFolder, keep_s: float) -> None:
    """Deletes outcomes that were stored more than `keep_s` seconds ago."""
    oldest_s = time.time() - keep_s
    for path in (state.path / "outcomes").iterdir():
        if path.stat().st_mtime < oldest_s:
            path.unlink(missing_ok=True)


def _file(state: StateFolder, key: str) -> Path:
    return state.path / "outcomes" / f"{key}.json"
