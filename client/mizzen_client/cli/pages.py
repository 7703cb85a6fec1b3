"""Text pages about one workload, for the commands `show` and `why`."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from mizzen.cli.printer import Column, cell, table
from mizzen_client.cli import formats

_ATTEMPTS = (
    Column("#", lambda a: a["attempt"], right=True),
    Column("REGION", lambda a: a["region"]),
    Column("AWARDED", lambda a: formats.clock(a["awarded_at"])),
    Column(
        "RUN TIME",
        lambda a: formats.between(a["started_at"], a["released_at"]) if a["started_at"] else None,
        right=True,
    ),
    Column("FROM STEP", lambda a: a["resumed_step"], right=True),
    Column("LAST STEP", lambda a: a["last_step"], right=True),
    Column("OUTCOME", lambda a: formats.reason(a["outcome"]) if a["released_at"] else "active"),
)
_MOST_USES = 8
"""Maximum number of tasks whose GPU use `show` lists."""
_MOST_LEFT = 4
"""Maximum number of tasks whose working directories `show` lists."""
_FEW_BYTES = 1_000_000
"""No warning is printed if the files together are at most this large."""


def why_page(why: Mapping[str, Any]) -> str:
    """Return the summary, then one line for each reason."""
    lines = [cell(why["summary"]), *(f"  {cell(formats.reason(reason))}" for reason in why["reasons"])]
    if why["position"] is not None:
        lines.append(f"  waited {_waited(why)}")
    if why.get("expected_start"):
        lines.append(f"  expected start: {why['expected_start']['sentence']}")
    return "\n".join(lines)


def show_page(workload: Mapping[str, Any]) -> str:
    """Return the main facts about a workload, its jobs and its attempts, which `workload["attempts"]` holds."""
    rows = [(name, value) for name, value in _facts(workload) if value]
    width = max(len(name) for name, _ in rows)
    lines = [f"{workload['id']}  {workload['name']}  (tenant {workload['tenant']})"]
    lines += [f"{name.ljust(width)}  {cell(value)}" for name, value in rows]
    lines += _after_lines(workload)
    lines += ["", "jobs"]
    for job in workload["jobs"]:
        role = "" if job["role"] == job["name"] else f" ({job['role']})"
        each = formats.resources(job["resources"])
        lines.append(f"  {job['name']}{role}: {_tasks(job)} with {each}")
        at = [f"{p['task']}@{p['machine']}" for p in workload["placement"] if p["job"] == job["name"]]
        if at:
            lines.append(f"    {' '.join(at)}")
    if workload.get("failed"):
        lines += ["", "failed elements"]
        lines += [f"  {one['element']['index']}: {cell(formats.reason(one['reason']))}" for one in workload["failed"]]
    lines += _gpu_lines(workload)
    lines += output_lines(workload)
    lines += left_lines(workload)
    lines += notification_lines(workload)
    if workload["attempts"]:
        lines += ["", "attempts"]
        lines += [f"  {line}" for line in table(workload["attempts"], _ATTEMPTS, None)]
    return "\n".join(lines)


def _tasks(job: Mapping[str, Any]) -> str:
    if job["most_tasks"] is None:
        return formats.plural(job["tasks"], "task")
    placed = "" if job["placed_tasks"] is None else f", {job['placed_tasks']} in the newest attempt,"
    return f"{job['tasks']} to {job['most_tasks']} tasks{placed}"


def _after_lines(workload: Mapping[str, Any]) -> list[str]:
    """Return lines about the dependencies of the workload, with their states."""
    lines = ["", "after"] if workload.get("after") else []
    for one in workload.get("after", ()):
        if one["not_before"]:
            what = formats.clock(one["not_before"])
        elif one["predecessor"]:
            which = f"{one['predecessor_name']} ({one['predecessor']}, {one['phase'] or 'deleted'})"
            what = f"{which} has {one['condition']}"
            if one["state"] == "each":
                what = f"the element of the same index of {which} has {one['condition']}"
        else:
            what = f"table {one['table']} has the partition {one['partition']}"
        lines.append(f"  {cell(what)}: {one['state']}")
    return lines


def _gpu_lines(workload: Mapping[str, Any]) -> list[str]:
    """Return lines about the GPU use of the running tasks, the least busy first."""
    newest = _newest(workload)
    used = [] if newest.get("released_at") else sorted(newest.get("gpu_use", ()), key=lambda one: one["percent"])
    lines = ["", "use of GPUs"] if used else []
    for one in used[:_MOST_USES]:
        each, size = formats.plural(one["gpus"], "GPU"), formats.size(one["used_bytes"])
        lines.append(f"  {one['job']}/{one['task']}: {each} {one['percent']} % busy, with {size} of memory in use")
    if len(used) > _MOST_USES:
        lines.append(f"  and {formats.plural(len(used) - _MOST_USES, 'more task')}")
    return lines


def output_lines(workload: Mapping[str, Any]) -> list[str]:
    """Return lines about the outputs in `workload["outputs"]`, and about outputs that the newest attempt lacks."""
    found, unstored = workload.get("outputs", ()), _newest(workload).get("unstored", ())
    lines = ["", "outputs"] if found or unstored else []
    for one in found:
        if one["error"] is None:
            what = f"{formats.size(one['size_bytes'])}, stored {formats.clock(one['stored_at'])}"
            note = f", without {formats.plural(one['left_out_count'], 'file')}" if one["left_out_count"] else ""
            lines.append(f"  {one['name']} of {one['job']}/{one['task']}, attempt {one['attempt']}: {what}{note}")
    why = {(one["name"], one["job"], one["task"]): one["error"] for one in found if one["error"]}
    why |= {(one["name"], one["job"], one["task"]): one["why"] for one in unstored}
    lines += [f"  {name} of {job}/{task} was not stored: {cell(text)}" for (name, job, task), text in why.items()]
    return lines


def left_lines(workload: Mapping[str, Any]) -> list[str]:
    """Return where the newest attempt has left files and until when, with a warning if the workload has ended."""
    left = [one for one in _newest(workload).get("left", ()) if formats.instant(one["until"]) > datetime.now(UTC)]
    if not left:
        return []
    lines = ["", "files in working directories"]
    for one in left[:_MOST_LEFT]:
        lines.append(f"  {one['job']}/{one['task']}: {formats.size(one['bytes'])} in {cell(one['path'])}")
        lines.append(f"    on {cell(one['machine'])} until {formats.clock(one['until'])}")
    if len(left) > _MOST_LEFT:
        lines.append(f"  and of {formats.plural(len(left) - _MOST_LEFT, 'more task')}")
    if workload["finished_at"] and sum(one["bytes"] for one in left) > _FEW_BYTES:
        lines.append("  warning: they are deleted then: copy them now. `keep` in the document keeps them for longer")

    return lines


def notification_lines(subject: Mapping[str, Any]) -> list[str]:
    """Return the notifications of the end of a workload or a service, and why they were not delivered."""
    found = subject.get("notifications", ())
    lines = ["", "notifications"] if found else []
    for one in found:
        error = f": {one['error']}" if one["error"] else ""
        if one["state"] == "due":
            state = f"tried again {formats.clock(one['due_at'])}{error}" if one["tries"] else "being sent"
        else:
            tries = f" after {formats.plural(one['tries'], 'try').replace('trys', 'tries')}"
            state = f"{one['state']} {formats.clock(one['ended_at'])}{tries}{error}"
        lines.append(f"  {cell(one['receiver'])}: {cell(state)}")
    return lines


def _facts(workload: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    reason = formats.reason(workload["reason"])
    yield "phase", f"{workload['phase']}{f' - {reason}' if reason else ''}"
    yield "elements", _elements(workload["array"])
    yield "element", _element(workload["element"])
    yield "held", f"by {workload['held_by']}" if workload["held_by"] else None
    yield "region", workload["region"]
    yield "level", None if workload["level"] is None else str(workload["level"])
    yield "submitted", formats.ago(workload["submitted_at"])
    yield "waited", _waited(workload) if workload["queued"] else None
    if workload["finished_at"]:
        took = formats.between(workload["submitted_at"], workload["finished_at"])
        yield "finished", f"{formats.ago(workload['finished_at'])}, {took} after submission"
    progress = workload["progress"] or {}
    yield "progress", _progress(progress)
    yield "saves", _cadence(progress.get("cadence"), progress.get("checkpoint_s"))
    yield "uplink", _uplink(_newest(workload).get("bandwidth"))
    yield "lost work", _lost(progress.get("at_risk_s"), workload.get("lost_s"))
    yield "load", _load(progress.get("load"))
    yield "failing", _failing(progress.get("failing"))
    yield "notice", _notice(progress.get("notice"))
    yield "checkpoint in", workload["checkpoint_region"]
    yield "preempted", formats.plural(workload["preemptions"], "time") if workload["preemptions"] else None
    yield "cost", _cost(workload)
    yield "tables", ", ".join(_tables(workload))
    yield "labels", formats.pairs(workload["labels"])


def _elements(array: Mapping[str, Any] | None) -> str | None:
    """Return the elements of an array by state."""
    if array is None:
        return None
    states = ("waiting", "live", "succeeded", "failed", "cancelled")
    counts = ", ".join(f"{array[state]} {state}" for state in states if array[state])
    throttle = f", at most {array['throttle']} at a time" if array["throttle"] else ""
    return f"{array['elements']} ({counts}){throttle}"


def _element(element: Mapping[str, Any] | None) -> str | None:
    """Return the index of an element in its array, with its parameters."""
    if element is None:
        return None
    parameters = formats.pairs(element["parameters"])
    return f"{element['index']} of {element['array']}{f' with {parameters}' if parameters else ''}"


def _waited(workload: Mapping[str, Any]) -> str:
    """Return how long a queued workload has waited and, if it is shorter, since when it could be placed."""
    waited, eligible_s = formats.duration(workload["waited_s"]), workload["eligible_s"]
    if eligible_s is None or formats.duration(eligible_s) == waited:
        return waited
    return f"{waited}, eligible for {formats.duration(eligible_s)}"


def _newest(workload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the newest attempt; empty if there was none."""
    return workload["attempts"][-1] if workload["attempts"] else {}


def _cost(workload: Mapping[str, Any]) -> str | None:
    usd, unpriced_h = workload.get("cost_usd"), workload.get("unpriced_h") or 0.0
    if not usd:  # If nothing has a price, the hours without a price are not worth a line.
        return None
    return f"{formats.usd(usd)}{f', and {formats.hours(unpriced_h)} h without a price' if unpriced_h else ''}"


def _tables(workload: Mapping[str, Any]) -> Iterator[str]:
    newest = _newest(workload)
    stale = newest.get("stale_tables", {}) if newest.get("released_at") is None else {}
    for name in workload["tables"]:
        yield f"{name} (stale: complete until {formats.clock(stale[name])})" if name in stale else name


def _progress(progress: Mapping[str, Any] | None) -> str | None:
    if not progress:
        return None
    parts = [] if progress.get("step") is None else [f"step {progress['step']}"]
    parts += [f"{name} {value:.6g}" for name, value in progress.get("metrics", {}).items()]
    if progress.get("checkpoint_step") is not None:
        facts = [formats.ago(progress.get("checkpoint_at")), formats.size(progress.get("checkpoint_bytes"))]
        known = ", ".join(fact for fact in facts if fact)
        parts.append(f"checkpoint of step {progress['checkpoint_step']}{f' ({known})' if known else ''}")
    return "; ".join(parts)


def _cadence(cadence: Mapping[str, Any] | None, took_s: float | None) -> str | None:
    """Return the checkpoint interval: `every 805 s (W): a save costs 30 s (C), an interruption comes every 3h (mu)`."""
    if not cadence:
        return None if took_s is None else f"the last save stalled the training for {took_s:.3g} s"
    known = [
        None if cadence["cost_s"] is None else f"a save costs {cadence['cost_s']:.3g} s (C)",
        None
        if cadence["mtbf_s"] is None
        else f"an interruption comes every {formats.duration(cadence['mtbf_s'])} (mu, by {cadence['source'] or '?'})",
    ]
    facts = ", ".join(fact for fact in known if fact)
    return f"every {cadence['interval_s']:.6g} s (W){f': {facts}' if facts else ''}"


def _uplink(bandwidth: Mapping[str, Any] | None) -> str | None:
    """Return a machine's bandwidth for checkpoints: `at least 9.5 MiB/s, on average 20.0 MiB/s (measured 3m ago)`."""
    if not bandwidth:
        return None
    lower, mean = formats.size(bandwidth["lower_bytes_s"]), formats.size(bandwidth["mean_bytes_s"])
    return f"at least {lower}/s, on average {mean}/s (measured {formats.ago(bandwidth['measured_at'])})"


def _lost(at_risk_s: float | None, lost_s: float | None) -> str | None:
    parts = [
        None if at_risk_s is None else f"{formats.duration(at_risk_s)} if it were interrupted now",
        f"{formats.duration(lost_s)} so far" if lost_s else None,
    ]
    return ", ".join(part for part in parts if part) or None


def _load(load: Mapping[str, Any] | None) -> str | None:
    """Return the state of loading a checkpoint if it is not the normal one, else None."""
    if not load or (load["state"] in ("loaded", "none") and not load["skipped"]):
        return None
    passed = f", {formats.plural(load['skipped'], 'checkpoint')} skipped as damaged" if load["skipped"] else ""
    return f"{load['state']}{passed}{': ' + load['error'] if load['error'] else ''}"


def _failing(failing: Mapping[str, Any] | None) -> str | None:
    if not failing:
        return None
    limit = f"; {failing['limit']}" if failing["limit"] else ""
    since = formats.clock(datetime.fromtimestamp(failing["since_s"], UTC).isoformat())
    return f"{formats.plural(failing['failures'], 'save')} in a row since {since}: {failing['error'] or '?'}{limit}"


def _notice(notice: Mapping[str, Any] | None) -> str | None:
    if not notice:
        return None
    return f"{notice['platform']} reports {notice['kind']}: {notice['decision'] or notice['words']}"
