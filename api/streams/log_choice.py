"""The selection of a request for a workload's logs: tasks, attempt and lines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import AwareDatetime, BaseModel, Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.auth import Caller
from api.problems import HttpProblem, ProblemType, invalid, not_found
from api.state import ApiState
from api.streams.task_log import LogFilter
from api.workloads.elements import is_array
from api.workloads.workload_queries import find
from domain.log_segments import TaskOutput
from domain.phases import TERMINAL_PHASES, Phase
from domain.slots import tasks_of_jobs
from infra.db.models import Attempt, Region, Workload

MAX_TASKS = 64
MAX_TAIL = 10_000
_MAX_ATTEMPT = 1 << 62


class LogQuery(BaseModel):
    """The parameters of a request for logs."""

    job: str | None = Field(None, description="Only tasks of this job")
    task: int | None = Field(None, ge=0, le=_MAX_ATTEMPT, description="Only tasks with this index")
    attempt: int | None = Field(None, ge=1, le=_MAX_ATTEMPT, description="Default: the newest. Not for an array")
    tail: int | None = Field(None, ge=0, le=MAX_TAIL, description="Only the last lines of each task")
    since: AwareDatetime | None = Field(
        None, description="Only lines that were uploaded after this time, so none that was written after it is missing"
    )
    output: Literal["stdout", "stderr"] | None = Field(
        None, description="Only lines of this output, of jobs with `output: separate`"
    )
    contains: str | None = Field(
        None, max_length=1000, description="Only lines that contain this text; of the lines that `tail` selects"
    )
    follow: bool = Field(False, description="Keep sending new lines until the workload has ended")

    def wanted(self, tail_bytes: int | None = None, skip: int = 0) -> LogFilter:
        """Returns the filter for the lines of each log. `tail_bytes`, `skip`: those of `LogFilter`."""
        since_ms = 0 if self.since is None else int(self.since.timestamp() * 1000)
        output = None if self.output is None else TaskOutput[self.output.upper()]
        return LogFilter(since_ms, output, (self.contains or "").encode(), tail_bytes, skip)


@dataclass(frozen=True)
class LogChoice:
    """The output that a request selects."""

    workload: str
    name: str
    is_array: bool
    tasks: list[tuple[str, int]]
    """(job, task) pairs; for an array, those of each element."""
    newest: int
    """Number of the newest attempt, 0 if there is none."""
    query: LogQuery
    tail_bytes: int | None = None
    """The most of the tails of all tasks together, or for an array of those of an element; None: no limit."""
    skip: int = 0
    """Number of the newest lines of each task that the tails leave out."""
    before: int | None = None
    """Only elements of an array with lower indexes, the highest first; None: all, the lowest first."""

    def wanted(self) -> LogFilter:
        """Returns the filter for the lines of the log of each task."""
        tail_bytes = None if self.tail_bytes is None else self.tail_bytes // max(1, len(self.tasks))
        return self.query.wanted(tail_bytes, self.skip)


@dataclass(frozen=True)
class LogPosition:
    """The part of a workload's state that is needed to follow its logs."""

    newest: int
    """Number of the newest attempt."""
    ended: bool
    """The workload has ended: there will be no further attempt."""
    released: bool
    """The attempt whose logs are read has ended."""
    region: str | None
    ended_ago_s: float
    """Seconds since the end of the attempt; infinite if it has not ended or is unknown."""
    tasks: Mapping[str, int]
    """The number of tasks of each job in the attempt, where it is known."""
    bucket_url: str | None
    """Bucket with the attempt's logs; None: the attempt does not exist."""


def choose(state: ApiState, caller: Caller, workload: str, query: LogQuery) -> LogChoice:
    """Returns the output that a request selects.

    Raises:
        Problem: 404, the workload or the attempt does not exist; 410, its logs were deleted; 422, a bad selection.
    """
    with state.transaction() as session:
        row = find(session, caller, workload)
        if row.expired_at is not None:
            raise HttpProblem(
                ProblemType.GONE, f"the logs of workload {row.id} were deleted at {row.expired_at:%Y-%m-%d %H:%M %Z}"
            )
        if query.attempt is not None and is_array(row):
            raise invalid("query.attempt", f"workload {row.id} is an array: ask for one of its elements", query.attempt)
        if query.attempt is not None and session.get(Attempt, (row.id, query.attempt)) is None:
            raise not_found(f"attempt of workload {row.id}", str(query.attempt))
        tasks = _tasks(row.id, _sizes(session, row, query), query)
        merged = {j["name"] for j in row.spec["jobs"] if j.get("output", "merged") == "merged"}
        if query.output is not None and (unknown := sorted(merged & {job for job, _ in tasks})):
            message = f"the outputs of job {unknown[0]} are merged: its document has no `output: separate`"
            raise invalid("query.output", message, query.output)
        return LogChoice(row.id, row.name, is_array(row), tasks, row.attempt, query)


def _sizes(session: Session, row: Workload, query: LogQuery) -> dict[str, int]:
    """Returns the number of tasks of each job; of an elastic one the most, because later attempts can have more tasks.

    If these are more than can be read at once, but the tasks of the attempt are not, it returns as many as can be.
    """
    jobs: dict[str, int] = {j["name"]: j.get("most_tasks") or j["tasks"] for j in row.spec["jobs"]}
    elastic = row.spec["jobs"][0]
    if query.task is None and elastic.get("most_tasks") and sum(jobs.values()) > MAX_TASKS:
        attempt = session.get(Attempt, (row.id, query.attempt or row.attempt))
        placed = elastic["tasks"] if attempt is None else tasks_of_jobs(attempt.plan["jobs"])[elastic["name"]]
        jobs[elastic["name"]] = max(placed, MAX_TASKS)
    return jobs


def _tasks(workload: str, jobs: dict[str, int], query: LogQuery) -> list[tuple[str, int]]:
    job, task = query.job, query.task
    if job is not None:
        if job not in jobs:
            raise invalid("query.job", f"workload {workload} has the jobs {', '.join(jobs)}", job)
        jobs = {job: jobs[job]}
    if task is not None:
        if all(task >= tasks for tasks in jobs.values()):
            raise invalid("query.task", f"must be at most {max(jobs.values()) - 1}", task)
        return [(name, task) for name, tasks in jobs.items() if task < tasks]
    total = sum(jobs.values())
    if total > MAX_TASKS:
        raise invalid("query.task", f"{total} tasks match, but at most {MAX_TASKS} can be read at once: "
                      "select a job and a task")  # fmt: skip
    return [(name, number) for name, tasks in jobs.items() for number in range(tasks)]


def position_of(state: ApiState, workload: str, attempt: int) -> LogPosition:
    """Returns the current state of a workload and of one of its attempts."""
    with state.transaction() as session:
        row = session.get(Workload, workload)
        own = session.get(Attempt, (workload, attempt))
        # The attempt of an array element that a runner runs gets a row only at its end.
        at = own.region if own is not None else row.region if row is not None and row.attempt == attempt else None
        region = session.get(Region, at) if at is not None else None
        released_at = None if own is None else own.released_at
        ago = None if released_at is None else session.execute(select(func.now())).scalar_one() - released_at
        return LogPosition(
            newest=row.attempt if row is not None else attempt,
            ended=row is None or Phase(row.phase) in TERMINAL_PHASES,
            released=(own is None and at is None) or released_at is not None,
            ended_ago_s=math.inf if ago is None else ago.total_seconds(),
            region=region.name if region is not None else None,
            tasks={} if own is None else tasks_of_jobs(own.plan["jobs"]),
            bucket_url=region.bucket_url if region is not None else None,
        )
