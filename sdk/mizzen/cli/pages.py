"""Readable pages of one workload: `show` and `why`."""

from collections.abc import Iterator, Mapping
from typing import Any

from mizzen.cli import words
from mizzen.cli.output import Column, cell, table

_ATTEMPTS = (
    Column("#", lambda a: a["attempt"], right=True),
    Column("REGION", lambda a: a["region"]),
    Column("AWARDED", lambda a: words.clock(a["awarded_at"])),
    Column("RAN", lambda a: words.between(a["started_at"], a["released_at"]) if a["started_at"] else None, right=True),
    Column("FROM", lambda a: a["resumed_step"], right=True),
    Column("TO", lambda a: a["last_step"], right=True),
    Column("OUTCOME", lambda a: words.reason(a["outcome"]) if a["released_at"] else "goes on"),
)


def why_page(why: Mapping[str, Any]) -> str:
    """The summary, then one line for each reason."""
    return "\n".join([cell(why["summary"]), *(f"  {cell(words.reason(reason))}" for reason in why["reasons"])])


def show_page(workload: Mapping[str, Any]) -> str:
    """All that a user asks first about a workload; `attempts` is part of the mapping."""
    rows = [(name, value) for name, value in _facts(workload) if value]
    width = max(len(name) for name, _ in rows)
    lines = [f"{workload['id']}  {workload['name']}  (tenant {workload['tenant']})"]
    lines += [f"{name.ljust(width)}  {cell(value)}" for name, value in rows]
    lines += ["", "jobs"]
    for job in workload["jobs"]:
        role = "" if job["role"] == job["name"] else f" ({job['role']})"
        each = words.resources(job["resources"])
        lines.append(f"  {job['name']}{role}: {words.plural(job['tasks'], 'task')} with {each}")
        at = [f"{p['task']}@{p['machine']}" for p in workload["placement"] if p["job"] == job["name"]]
        if at:
            lines.append(f"    {' '.join(at)}")
    if workload["attempts"]:
        lines += ["", "attempts"]
        lines += [f"  {line}" for line in table(workload["attempts"], _ATTEMPTS, None)]
    return "\n".join(lines)


def _facts(workload: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    reason = words.reason(workload["reason"])
    yield "phase", f"{workload['phase']}{f' - {reason}' if reason else ''}"
    yield "held", f"by {workload['held_by']}" if workload["held_by"] else None
    yield "region", workload["region"]
    yield "level", None if workload["level"] is None else str(workload["level"])
    yield "submitted", words.ago(workload["submitted_at"])
    if workload["finished_at"]:
        took = words.between(workload["submitted_at"], workload["finished_at"])
        yield "finished", f"{words.ago(workload['finished_at'])}, {took} after it was submitted"
    yield "progress", _progress(workload["progress"])
    yield "checkpoint in", workload["checkpoint_region"]
    yield "preempted", f"{workload['preemptions']} times" if workload["preemptions"] else None
    yield "tables", ", ".join(workload["tables"])
    yield "labels", words.pairs(workload["labels"])


def _progress(progress: Mapping[str, Any] | None) -> str | None:
    if not progress:
        return None
    parts = [] if progress.get("step") is None else [f"step {progress['step']}"]
    if progress.get("checkpoint_step") is not None:
        facts = [words.ago(progress.get("checkpoint_at")), words.size(progress.get("checkpoint_bytes"))]
        known = ", ".join(fact for fact in facts if fact)
        parts.append(f"checkpoint of step {progress['checkpoint_step']}{f' ({known})' if known else ''}")
    return "; ".join(parts)
