"""The judge: pure functions that derive the violations from the observations."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import inf

from tests.chaos.observed import Observed, Order, TaskRun

STATUS_WRITTEN_S = 2.0
"""The time after the end of a task by which the shim has written its exit status to disk."""
RECOVERED_S = 10.0
"""The time after an outage by which the ends of tasks from before are recorded."""
STATUS_SENT_S = 10.0
"""The time after the end of a task by which a reachable agent has sent its exit status."""
SCANS = 3
"""A whole pass lies between two samples of the queue that are this many scans apart, and its awards are committed."""
CANCEL_S = 120.0
"""A task that starts later than this after the acknowledged cancellation of its workload is a violation."""


@dataclass(frozen=True)
class Violation:
    """A failed check: its kind, a key of `KINDS`, and the details."""

    kind: str
    detail: str


KINDS = {
    "started-twice": "a task of an attempt was started more than once",
    "slot-shared": "two tasks were alive on one GPU slot at the same time",
    "owner-disturbed": "a task ran where the owner had been told that nothing runs, before the owner lent it again",
    "older-saved": "an older attempt saved after a newer one had loaded",
    "checkpoint-lost": "an attempt resumed from an older step than one whose save had returned",
    "finished-again": "a gang whose tasks had all exited with 0 ran again",
    "throttle-exceeded": "more elements of an array held slots at one time than its throttle allows",
    "repeated": "an element that may be started at most once was started twice",
    "element-lost": "an element did not end, or the counts of its array contradict the ends of the elements",
    "array-ended-early": "an element finished, or was started, after its array had ended",
    "too-early": "a workload ran before the one that it depends on had succeeded",
    "lost": "an acknowledged workload does not exist",
    "refused": "a valid request was rejected",
    "not-placed": "after the last fault, a pass left a workload in the queue that fits an idle region",
    "never-ended": "a workload did not end after the last fault",
    "duplicate": "one Idempotency-Key created two workloads, or a workload exists that no user requested",
    "wrong-end": "the reported outcome contradicts what the tasks did",
    "cancel-ignored": "an attempt was started long after the cancellation of its workload was acknowledged",
    "left-behind": "a process outlived the stack",
    "withheld": "at the end a machine takes no work, or still holds slots",
    "stack": "the stack did not start again, or ended by itself",
}


def judge(seen: Observed) -> list[Violation]:
    """Returns all violations, by kind in the order of `KINDS`."""
    checks = (_starts, _slots, _owned, _checkpoints, _dependents, _workloads, _queue, _surroundings)
    found = [violation for check in checks for violation in check(seen)]
    order = list(KINDS)
    return sorted(found, key=lambda v: (order.index(v.kind), v.detail))


def _starts(seen: Observed) -> Iterator[Violation]:
    started: dict[tuple[str, int, str, int], list[TaskRun]] = defaultdict(list)
    for run in seen.runs:
        started[run.workload, run.attempt, run.job, run.task].append(run)
    for (workload, attempt, job, task), runs in started.items():
        if len(runs) > 1:
            pids = ", ".join(f"{r.pid} at {r.started_s:.2f} s" for r in sorted(runs, key=lambda r: r.started_s))
            yield Violation("started-twice", f"{workload}.{attempt} {job}/{task}: pids {pids}")


def _slots(seen: Observed) -> Iterator[Violation]:
    held: dict[tuple[str, int], list[TaskRun]] = defaultdict(list)
    for run in seen.runs:
        for slot in run.slots:
            held[run.machine, slot].append(run)
    for (machine, slot), runs in held.items():
        runs.sort(key=lambda r: (r.started_s, r.workload, r.attempt))
        for one, other in combinations(runs, 2):
            if other.started_s < one.last_s and one.started_s < other.last_s:
                both = " and ".join(f"{r.workload}.{r.attempt} {r.job}/{r.task}" for r in (one, other))
                for_s = min(one.last_s, other.last_s) - other.started_s
                yield Violation("slot-shared", f"{machine} slot {slot}: {both} for {for_s:.2f} s")


def _owned(seen: Observed) -> Iterator[Violation]:
    for owned in seen.owned:
        for run in seen.runs:
            there = run.machine == owned.machine and (owned.slots is None or set(owned.slots) & set(run.slots))
            if there and run.started_s < owned.lent_s and owned.free_s < run.last_s:
                task = f"{run.workload}.{run.attempt} {run.job}/{run.task}"
                yield Violation(
                    "owner-disturbed", f"{owned.machine}: {task} until {run.last_s - owned.free_s:.2f} s after"
                )


def _checkpoints(seen: Observed) -> Iterator[Violation]:
    by_workload: dict[str, list[TaskRun]] = defaultdict(list)
    for run in seen.runs:
        by_workload[run.workload].append(run)
    for workload, runs in by_workload.items():
        for newer in runs:
            if newer.loaded is None:
                continue
            loaded_s, step = newer.loaded
            saves = [(at, s, r.attempt) for r in runs if r.attempt < newer.attempt for at, s in r.saved]
            late = [(at, s, a) for at, s, a in saves if at > loaded_s]
            if late:
                at, s, a = max(late)
                detail = (
                    f"{workload}: attempt {a} saved step {s} {at - loaded_s:.2f} s after attempt {newer.attempt} loaded"
                )
                yield Violation("older-saved", detail)
            newest = max((s for at, s, _ in saves if at <= loaded_s), default=0)
            if step < newest:
                detail = f"{workload}.{newer.attempt} {newer.job}/{newer.task}: resumed at {step}, saved was {newest}"
                yield Violation("checkpoint-lost", detail)


def _finished(seen: Observed, workload: str) -> Iterator[tuple[int, list[TaskRun]]]:
    """Yields the attempts of a workload whose tasks all recorded exit code 0, each with its task runs."""
    attempts: dict[int, list[TaskRun]] = defaultdict(list)
    for run in seen.runs:
        if run.workload == workload:
            attempts[run.attempt].append(run)
    for attempt, runs in sorted(attempts.items()):
        ended = {(r.job, r.task) for r in runs if r.exit_code == 0}
        if len(ended) == runs[0].tasks:
            yield attempt, runs


def _unsure(seen: Observed, runs: list[TaskRun], again_s: float) -> bool:
    """Returns whether mizzen may not have known the exit codes when it started other tasks at `again_s`.

    A shim or task was killed, a machine was unreachable, or its owner took it when the task had just ended or still
    ran, because its agent then answers no requests.
    """
    for killed in seen.killed:
        if any(r.run_id == killed.run_id and killed.at_s < r.last_s + STATUS_WRITTEN_S for r in runs):
            return True
    for o in seen.owned:
        if o.free_s <= again_s and any(
            o.machine == r.machine and o.taken_s - STATUS_SENT_S <= r.last_s <= o.lent_s for r in runs
        ):
            return True
    return any(_is_lost_before_its_end_is_known(seen, run.last_s) for run in runs)


def _is_lost_before_its_end_is_known(seen: Observed, last_s: float) -> bool:
    """Returns whether a machine may count as lost before the end of a task on it could be recorded."""
    known_s = last_s + STATUS_WRITTEN_S
    for begin_s, end_s in sorted([*seen.outages, *seen.blackouts]):
        if begin_s > known_s:
            return False
        if (begin_s, end_s) in seen.blackouts and last_s <= _handled_s(seen, end_s):
            return True
        known_s = max(known_s, end_s + RECOVERED_S)
    return False


def _handled_s(seen: Observed, end_s: float) -> float:
    """Returns when a loss by a blackout is handled: during an outage, the end of a task does not undo the loss."""
    for begin_s, over_s in sorted(seen.outages):
        if begin_s <= end_s:
            end_s = max(end_s, over_s)
    return end_s


def _ids(seen: Observed, name: str) -> set[str]:
    """Returns the ids of the workloads with a name, from responses and from the listing."""
    told = {id_ for order in seen.orders if order.name == name for id_ in order.ids}
    return told | {id_ for id_, known in seen.names.items() if known == name}


def _parts(order: Order, workload: str) -> list[str]:
    """Returns the ids of the elements of an array, in the order of their indexes, or else the workload itself."""
    return [workload] if order.array is None else [f"{workload}-{index}" for index in range(order.array.number)]


def _done_s(seen: Observed, part: str) -> float:
    """Returns when all tasks of a workload or element had first exited with 0; infinite if they never did."""
    return min((max(r.last_s for r in runs) for _, runs in _finished(seen, part)), default=inf)


def _depends(seen: Observed, order: Order) -> Iterator[tuple[str, list[str]]]:
    """Yields each workload or element of an order that depends on the success of others, with these."""
    first = next((one for one in seen.orders if order.after is not None and one.name == order.after[0]), None)
    if first is None or order.after is None or order.after[1] != "succeeded":
        return
    for workload in _ids(seen, order.name):
        for index, part in enumerate(_parts(order, workload)):
            before = [_parts(first, one) for one in _ids(seen, first.name)]
            yield part, [id_ for ids in before for id_ in (ids[index : index + 1] if order.same_index else ids)]


def _dependents(seen: Observed) -> Iterator[Violation]:
    for order in seen.orders:
        for part, before in _depends(seen, order):
            begun_s = min((r.started_s for r in seen.runs if r.workload == part), default=inf)
            done_s = max((_done_s(seen, one) for one in before), default=inf)
            if begun_s < done_s:
                what = f"{done_s - begun_s:.2f} s before" if done_s < inf else "without"
                yield Violation("too-early", f"{order.name} {part}: began {what} the end of {', '.join(before)}")


def _phase(seen: Observed, part: str) -> str | None:
    """Returns the phase of a workload or element at the end."""
    array, _, index = part.rpartition("-")
    own = seen.arrays.get(array)
    return seen.phases.get(part) if own is None else own.elements[int(index)].phase


def _waited_in_vain(seen: Observed, order: Order, part: str, why: str) -> bool:
    """Returns whether a workload or element was rightly cancelled because what it depends on had not succeeded."""
    before = dict(_depends(seen, order)).get(part, [])
    return "dependency_never" in why and any(_phase(seen, one) in ("failed", "cancelled") for one in before)


def _workloads(seen: Observed) -> Iterator[Violation]:
    named: dict[str, set[str]] = {order.name: set(order.ids) for order in seen.orders}
    for workload, name in seen.names.items():
        if name not in named:
            yield Violation("duplicate", f"{workload} {name}: no user requested it")
        else:
            named[name].add(workload)  # If all responses were lost, the id is known from the listing only.
    for name, ids in named.items():
        if len(ids) > 1:
            yield Violation("duplicate", f"{name}: {', '.join(sorted(ids))}")
    for order in seen.orders:
        if order.refused is not None:
            yield Violation("refused", f"{order.name}: {order.refused}")
        for workload in sorted(order.ids or named[order.name]):  # All responses may have been lost.
            phase = seen.phases.get(workload)
            why = seen.reasons.get(workload, "")
            if phase is None:
                yield Violation("lost", f"{order.name} {workload}: acknowledged, but does not exist")
                continue
            if phase not in ("succeeded", "failed", "cancelled"):
                yield Violation("never-ended", f"{order.name} {workload}: {phase} {why}")
                continue
            if order.array is None:
                yield from _end(seen, order, workload, phase, why)
            else:
                yield from _array_end(seen, order, workload)


def _array_end(seen: Observed, order: Order, workload: str) -> Iterator[Violation]:
    array = seen.arrays.get(workload)
    assert order.array is not None
    if array is None or array.finished_s is None:
        yield Violation("element-lost", f"{order.name} {workload}: no array that has ended")
        return
    ends = [element.phase for element in array.elements.values()]
    if len(ends) != order.array.number or {p: ends.count(p) for p in array.counts} != array.counts:
        yield Violation("element-lost", f"{order.name} {workload}: {array.counts}, but the elements are {ends}")
        return
    for index, part in enumerate(_parts(order, workload)):
        element = array.elements[index]
        yield from _end(seen, order, part, element.phase, element.why)
        if element.phase == "succeeded" and array.finished_s < (done_s := _done_s(seen, part)) < inf:
            late_s = done_s - array.finished_s
            yield Violation("array-ended-early", f"{order.name} {part}: finished {late_s:.2f} s after its array")
        for run in seen.runs:
            if run.workload == part and run.started_s > array.finished_s + CANCEL_S:
                yield Violation("array-ended-early", f"{order.name} {part}: attempt {run.attempt} began afterwards")
        starts = [run.attempt for run in seen.runs if run.workload == part]
        if order.array.at_most_once and len(starts) > 1:
            yield Violation("repeated", f"{order.name} {part}: attempts {starts}")
    held = [*array.runners]
    if order.array.interrupt is None:
        held = [times for element in array.elements.values() for times in element.held]
    most = max((sum(begin <= at_s < end for begin, end in held) for at_s, _ in held), default=0)
    if most > order.array.throttle:
        detail = f"{order.name} {workload}: {most} elements, the throttle is {order.array.throttle}"
        yield Violation("throttle-exceeded", detail)


def _end(seen: Observed, order: Order, workload: str, phase: str, why: str) -> Iterator[Violation]:
    """Yields the contradictions between the reported end of a workload or element, and what its tasks did."""
    runs = [r for r in seen.runs if r.workload == workload]
    finished = list(_finished(seen, workload))
    for attempt, ended in finished:
        again = [r for r in runs if r.attempt > attempt]
        again_s = min((r.started_s for r in again), default=0.0)
        if again and not any(r.told for r in ended) and not _unsure(seen, ended, again_s):
            yield Violation("finished-again", f"{order.name} {workload}: attempt {attempt} had finished")
    if phase == "succeeded" and not finished:
        yield Violation("wrong-end", f"{order.name} {workload}: succeeded, but not all tasks exited with 0")
    ids = {r.run_id for r in runs}
    killed = any(k.run_id in ids or k.run_id.startswith(f"{workload}.") for k in seen.killed)
    once = order.array is not None and order.array.at_most_once
    is_excused = ((order.exit_code or once) and killed) or (once and "at_most_once" in why)
    if phase == "failed" and not any(r.exit_code for r in runs) and not is_excused:
        yield Violation("wrong-end", f"{order.name} {workload}: failed ({why}), but none of its tasks failed")
    if phase == "cancelled" and order.cancel_sent_s is None and not _waited_in_vain(seen, order, workload, why):
        yield Violation("wrong-end", f"{order.name} {workload}: cancelled, but no user requested that")
    if order.cancelled_s is not None:
        for run in runs:
            after_s = run.started_s - order.cancelled_s
            if after_s > CANCEL_S:
                detail = f"{order.name} {workload}.{run.attempt}: started {after_s:.0f} s after its cancellation"
                yield Violation("cancel-ignored", detail)


def _queue(seen: Observed) -> Iterator[Violation]:
    since: dict[tuple[str, str], int] = {}
    found: dict[str, str] = {}
    before = 0
    for sample in seen.samples:
        if sample.scans < before:  # The scheduler was started again.
            since.clear()
        before = sample.scans
        since = {pair: since.get(pair, sample.scans) for pair in sample.fits}
        found |= {w: region for (w, region), scans in since.items() if sample.scans - scans >= SCANS}
    for workload, region in found.items():
        yield Violation("not-placed", f"{seen.names.get(workload, '')} {workload}: {region} was idle for {SCANS} scans")


def _surroundings(seen: Observed) -> Iterator[Violation]:
    for process in seen.left_behind:
        yield Violation("left-behind", process)
    for machine in seen.withheld:
        yield Violation("withheld", machine)
    for failure in seen.stack_failures:
        yield Violation("stack", failure)
