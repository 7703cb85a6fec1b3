"""Reads a task's progress from the report file, which `mizzen.report` in the SDK writes, and from file times."""

import json
import math
import os
import re
import stat
import time
from typing import Any

from agent.secret_masks import MASK, Masker
from agent.tasks import RunFolder
from domain.task_reports import CadenceReport, FailingReport, LoadReport, LoadState, NoticeReport, TaskProgress
from mizzen.report import MAX_METRICS

_MAX_REPORT_BYTES = 64 << 10
_MAX_WORDS = 500
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
"""Pattern of a platform's name and of a kind of notice."""
_METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,47}")
_LATEST_S = 253402300799.0
"""The end of the year 9999 in epoch seconds. Later times in a report are ignored."""


def read_progress(run: RunFolder, masker: Masker | None) -> TaskProgress:
    """Returns the task's progress. Fields of the report that are missing or invalid become None.

    `masker` masks secrets in the report's texts, because these texts leave the machine. If it is None, the secrets are
    unknown and every text is replaced by the mask.
    """
    report = _read_report(run.report)
    checkpoint = _part(report, "checkpoint")
    return TaskProgress(
        job=run.job,
        task=run.task,
        step=_whole(report.get("step")),
        resumed_step=_whole(report.get("resumed_step")),
        checkpoint_step=_whole(checkpoint.get("step")),
        checkpoint_at_s=_time(checkpoint.get("at_s")),
        checkpoint_bytes=_whole(checkpoint.get("bytes")),
        checkpoint_s=_number(checkpoint.get("duration_s")),
        active_at_s=last_sign_s(run),
        checkpoint_write_s=_number(checkpoint.get("write_s")),
        cadence=_cadence(_part(report, "cadence"), masker),
        load=_load(_part(report, "load"), masker),
        notice=_notice(_part(report, "notice"), masker),
        checkpoint_sent_bytes=_whole(checkpoint.get("sent_bytes")),
        failing=_failing(_part(report, "failing"), masker),
        pre_sync=report.get("pre_sync") is True,
        metrics=_metrics(_part(report, "metrics")),
    )


class NoticeReader:
    """Reads one task's notice repeatedly, and opens the report file only if it has changed since the last read."""

    def __init__(self, run: RunFolder, masker: Masker | None) -> None:
        """`masker` has the same meaning as in `read_progress`."""
        self._run = run
        self._masker = masker
        self._seen: tuple[int, int, int] | None = None
        self._notice: NoticeReport | None = None

    def read(self) -> NoticeReport | None:
        """Returns the notice in the task's current report, or None if there is none."""
        try:
            status = os.lstat(self._run.report)
        except OSError:
            return self._notice
        now = (status.st_ino, status.st_mtime_ns, status.st_size)
        if now != self._seen:
            self._seen = now
            self._notice = _notice(_part(_read_report(self._run.report), "notice"), self._masker)
        return self._notice


def _cadence(body: dict[str, Any], masker: Masker | None) -> CadenceReport | None:
    interval_s = _number(body.get("interval_s"))
    if interval_s is None:
        return None
    return CadenceReport(
        interval_s,
        _number(body.get("cost_s")),
        _number(body.get("mtbf_s")),
        _number(body.get("step_s")),
        _words(body.get("source"), masker),
    )


def _metrics(body: dict[str, Any]) -> dict[str, float]:
    found = [(name, number) for name, value in body.items() if (number := _real(value)) is not None]
    return dict([one for one in found if _METRIC.fullmatch(one[0])][:MAX_METRICS])


def _load(body: dict[str, Any], masker: Masker | None) -> LoadReport | None:
    state = body.get("state")
    if not isinstance(state, str) or state not in list(LoadState):
        return None
    return LoadReport(state, _words(body.get("error"), masker), _whole(body.get("skipped")) or 0)


def _failing(body: dict[str, Any], masker: Masker | None) -> FailingReport | None:
    failures, since_s = _whole(body.get("failures")), _time(body.get("since_s"))
    if not failures or since_s is None:
        return None
    return FailingReport(failures, since_s, _words(body.get("error"), masker), _words(body.get("limit"), masker))


def _notice(body: dict[str, Any], masker: Masker | None) -> NoticeReport | None:
    platform, kind, at_s = body.get("platform"), body.get("kind"), _time(body.get("at_s"))
    if not (isinstance(platform, str) and isinstance(kind, str) and at_s is not None):
        return None
    if not _NAME.fullmatch(platform) or not _NAME.fullmatch(kind):
        return None
    # Older SDKs do not write `certain`. Their only uncertain kind is "rebalance".
    certain = body.get("certain", kind != "rebalance") is True
    ends_at_s = _time(body.get("ends_at_s"))
    return NoticeReport(
        platform,
        kind,
        certain,
        at_s,
        ends_at_s,
        _words(body.get("words"), masker) or "",
        _words(body.get("decision"), masker),
    )  # fmt: skip


def last_sign_s(run: RunFolder) -> float | None:
    """Returns when the task last started, reported or wrote output, in epoch seconds; None if it never started.

    Uses modification times of files, not the content of the report: every report rewrites its file.
    """
    started_at_s = run.started_at_s()
    if started_at_s is None:
        return None
    seen = [started_at_s]
    for path in (run.report, run.output, run.errors):
        try:
            seen.append(os.lstat(path).st_mtime)
        except OSError:
            continue
    # A task can set a file's time to the future. Without this limit it would look active until then.
    return min(max(seen), time.time())


def _read_report(path: os.PathLike[str]) -> dict[str, Any]:
    # The task owns the folder, so the path may be a symbolic link to another user's file, or a pipe without a writer.
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


def _part(report: dict[str, Any], name: str) -> dict[str, Any]:
    part = report.get(name)
    return part if isinstance(part, dict) else {}


def _words(value: object, masker: Masker | None) -> str | None:
    """Returns `value` masked, shortened to `_MAX_WORDS`, and without zero characters and lone surrogates, which
    Postgres rejects; None if it is not a text.
    """
    if not isinstance(value, str):
        return None
    if masker is None:
        return MASK.decode()
    # A text of this length may have been truncated by the SDK, in the middle of a secret.
    return masker.mask_words(value, is_cut=len(value) >= _MAX_WORDS)[:_MAX_WORDS].replace("\0", "")


def _time(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and number <= _LATEST_S else None


def _number(value: object) -> float | None:
    number = _real(value)
    return number if number is not None and number >= 0 else None


def _real(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None
