"""Writes the reports of a gang's tasks into the row of their attempt. Impossible values are limited or left out."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from domain import ids
from domain.output_manifest import MAX_TEXT
from domain.progress_curve import Point, with_point
from domain.registration import MAX_MEMORY_BYTES
from domain.slots import MAX_SLOTS
from domain.task_reports import SAVES_KEPT, BandwidthReport, GpuReport, LeftFiles, LoadState, TaskProgress
from infra.db.models import Attempt

_LONGEST_KEPT_S = 366 * 86400.0
_LONGEST_PATH = 4096
_LONGEST_TEXT = 200
_MOST_USES = 256
"""Tasks of an attempt whose use of GPUs is kept."""
_MOST_LEFT = 100
"""The tasks of an attempt that have left most are shown, at most this many."""
_MOST_UNSTORED = 100
_MOST_LEFT_BYTES = 1 << 60


def set_progress(attempt: Attempt, progress: list[TaskProgress]) -> bool:
    """Writes the newest reports of a gang's tasks into the attempt's row; returns whether a step has changed."""
    before = (attempt.last_step, attempt.checkpoint_step, attempt.resumed_step)
    steps = [p.step for p in progress if p.step is not None]
    resumed = [p.resumed_step for p in progress if p.resumed_step is not None]
    saved = [p for p in progress if p.checkpoint_step is not None and p.checkpoint_at_s is not None]
    if steps:
        attempt.last_step = max([*steps, attempt.last_step or 0])
    if resumed:
        attempt.resumed_step = max(resumed)
    if saved:
        newest = max(saved, key=lambda p: (p.checkpoint_step or 0, p.job, p.task))
        if attempt.checkpoint_step is None or (newest.checkpoint_step or 0) >= attempt.checkpoint_step:
            # The time is reported by the task, which is not trusted, so it is limited to the current time. That limit
            # differs at each report of the same checkpoint, so only the first report counts.
            at_s = min(newest.checkpoint_at_s or 0.0, datetime.now(UTC).timestamp())
            if newest.checkpoint_step != attempt.checkpoint_step:
                attempt.checkpoint_step = newest.checkpoint_step
                attempt.checkpoint_at = datetime.fromtimestamp(at_s, UTC)
                _add_save(attempt, newest)
            attempt.checkpoint_bytes = newest.checkpoint_bytes
            attempt.checkpoint_s = _possible_s(newest.checkpoint_s)
            attempt.checkpoint_write_s = _possible_s(newest.checkpoint_write_s)
    in_order = sorted(progress, key=lambda p: (p.job, p.task))
    _set_reports(attempt, in_order)
    if steps:
        _add_point(attempt, attempt.last_step or 0, in_order)
    return before != (attempt.last_step, attempt.checkpoint_step, attempt.resumed_step)


def _add_point(attempt: Attempt, step: int, progress: list[TaskProgress]) -> None:
    """Writes the metrics of the first task that reports any, and adds them to the attempt's curve, with the step."""
    told = next((p.metrics for p in progress if p.metrics), {})
    attempt.metrics = told or attempt.metrics
    points = [Point(*point) for point in attempt.curve or []]
    longer = with_point(points, Point(step, datetime.now(UTC).timestamp(), told))
    if longer != points:
        attempt.curve = [list(point) for point in longer]


def _possible_s(reported_s: float | None) -> float | None:
    """Returns a reported duration, or None if it is impossible: no agent has to send what a task has measured."""
    return reported_s if reported_s is not None and 0 <= reported_s < math.inf else None


def _add_save(attempt: Attempt, saved: TaskProgress) -> None:
    """Adds a save to the last ones, with the size of the whole checkpoint if what it has written is not known."""
    size_bytes, sent_bytes = saved.checkpoint_bytes, saved.checkpoint_sent_bytes
    took_s = _possible_s(saved.checkpoint_write_s)
    if size_bytes is None or took_s is None:
        return
    wrote_bytes = size_bytes if sent_bytes is None else min(sent_bytes, size_bytes)
    attempt.saves = [*(attempt.saves or []), [wrote_bytes, took_s]][-SAVES_KEPT:]


def set_bandwidth(attempt: Attempt, measured: Sequence[BandwidthReport]) -> None:
    """Writes the measured bandwidth of a gang: the report with the lowest bound, because any machine may save.

    Reports that no link can have are left out. Each affects only attempts on the machine that sent it.
    """
    possible = [one for one in measured if one.is_possible]
    if possible:
        least = min(possible, key=lambda one: one.lower_bytes_s)
        attempt.bandwidth = asdict(replace(least, at_s=min(least.at_s, datetime.now(UTC).timestamp())))


def set_preparing(attempt: Attempt, told: Mapping[str, str]) -> None:
    """Writes what the start of the tasks waits for, by machine. Any agent of the gang may send any text."""
    attempt.preparing = {machine: text[:_LONGEST_TEXT] for machine, text in sorted(told.items()) if text} or None


def _set_reports(attempt: Attempt, progress: list[TaskProgress]) -> None:
    """Writes the cadence, load state, failing saves and notice of an attempt, from its tasks' reports in order.

    The first reported cadence and notice are used. Of the load states, the worst is used: failed, then started. Of the
    tasks whose saves fail, the one with the most failures is used.
    """
    cadences = [p.cadence for p in progress if p.cadence is not None]
    loads = [p.load for p in progress if p.load is not None]
    notices = [p.notice for p in progress if p.notice is not None]
    failing = [p.failing for p in progress if p.failing is not None]
    if cadences:
        attempt.cadence = asdict(cadences[0])
    if loads:
        order = [LoadState.FAILED, LoadState.STARTED, LoadState.NONE, LoadState.LOADED]
        attempt.load = asdict(min(loads, key=lambda load: order.index(LoadState(load.state))))
    if notices:
        attempt.notice = asdict(notices[0])
    attempt.failing = asdict(max(failing, key=lambda report: report.failures)) if failing else None
    left = sorted((_left(p, p.left) for p in progress if p.left is not None), key=lambda one: -int(one["bytes"]))
    if left:
        attempt.left_files = left[:_MOST_LEFT]
    if unstored := _unstored(progress):
        attempt.unstored = unstored[:_MOST_UNSTORED]
    used = [_gpu_use(p, p.gpu) for p in progress if p.gpu is not None]
    if used:
        attempt.gpu_use = used[:_MOST_USES]


def _gpu_use(task: TaskProgress, gpu: GpuReport) -> dict[str, Any]:
    """Returns a task's use of its GPUs, limited to possible values."""
    gpus = min(max(gpu.gpus, 0), MAX_SLOTS)
    percent, used_bytes = min(max(gpu.percent, 0), 100), min(max(gpu.used_bytes, 0), MAX_MEMORY_BYTES)
    return {"job": task.job, "task": task.task} | asdict(GpuReport(gpus, percent, used_bytes))


def _left(task: TaskProgress, left: LeftFiles) -> dict[str, Any]:
    """Returns the files that a task has left, limited to possible values: an untrusted agent can report anything."""
    until_s = min(max(left.until_s, 0.0), time.time() + _LONGEST_KEPT_S) if math.isfinite(left.until_s) else 0.0
    path, machine = _clean(left.path), _clean(left.machine)
    size = min(max(left.bytes, 0), _MOST_LEFT_BYTES)
    return {"job": task.job, "task": task.task} | asdict(LeftFiles(machine[:256], path[:_LONGEST_PATH], size, until_s))


def _unstored(progress: list[TaskProgress]) -> list[dict[str, Any]]:
    """Returns the outputs that agents have not stored, limited to possible values.

    Outputs that only some tasks make, for example only rank 0, are left out.
    """
    lack = Counter(one.name for task in progress for one in task.unstored if one.is_missing)
    return [
        {
            "job": task.job,
            "task": task.task,
            "name": _clean(one.name)[: ids.NAME_LENGTH],
            "why": _clean(one.why)[:MAX_TEXT],
        }
        for task in progress
        for one in task.unstored
        if not one.is_missing or lack[one.name] == len(progress)
    ]


def _clean(text: str) -> str:
    return text.replace("\0", "").encode(errors="replace").decode()
