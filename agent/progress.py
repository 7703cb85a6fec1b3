"""What a task last said of itself: its report (written by `mizzen.report` in the SDK), and its signs of life."""

import json
import math
import os
import stat
import time
from typing import Any

from agent.tasks import RunFolder
from domain.protocol import TaskProgress

_MAX_REPORT_BYTES = 64 << 10


def read_progress(run: RunFolder) -> TaskProgress:
    """The task's progress. A report that is absent, forged or half sensible gives as much as can be trusted."""
    report = _read_report(run.report)
    checkpoint = report.get("checkpoint")
    if not isinstance(checkpoint, dict):
        checkpoint = {}
    return TaskProgress(
        job=run.job,
        task=run.task,
        step=_whole(report.get("step")),
        resumed_step=_whole(report.get("resumed_step")),
        checkpoint_step=_whole(checkpoint.get("step")),
        checkpoint_at_s=_number(checkpoint.get("at_s")),
        checkpoint_bytes=_whole(checkpoint.get("bytes")),
        checkpoint_s=_number(checkpoint.get("duration_s")),
        active_at_s=last_sign_s(run),
    )


def last_sign_s(run: RunFolder) -> float | None:
    """When (epoch seconds) it started, reported or wrote output last; None: it never started.

    File times, not what the report says: every report, also of a checkpoint, touches its file.
    """
    started_at_s = run.started_at_s()
    if started_at_s is None:
        return None
    seen = [started_at_s]
    for path in (run.report, run.output):
        try:
            seen.append(os.lstat(path).st_mtime)
        except OSError:
            continue
    # A file from the future would otherwise count as a sign of life until then.
    return min(max(seen), time.time())


def _read_report(path: os.PathLike[str]) -> dict[str, Any]:
    # The folder is the task's: what is there may be a link to another's file, or a pipe that nobody writes to.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_REPORT_BYTES:
            return {}
        try:
            body = json.loads(file.read(_MAX_REPORT_BYTES))
        except (ValueError, RecursionError):
            return {}
    return body if isinstance(body, dict) else {}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None
