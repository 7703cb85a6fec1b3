"""What is seen from outside: the tasks' journals, what users were answered, and what the harness itself did."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TaskRun:
    """One process of one task, by its journal. Times are seconds of CLOCK_BOOTTIME."""

    workload: str
    attempt: int
    job: str
    task: int
    machine: str
    slots: tuple[int, ...]
    tasks: int
    """Tasks of its job."""
    pid: int
    started_s: float
    last_s: float
    """When it was last seen alive."""
    loaded: tuple[float, int] | None = None
    """When it had loaded, and from which step it goes on; None: it did not come so far."""
    saved: tuple[tuple[float, int], ...] = ()
    """When each save had returned, and its step."""
    preempted: bool = False
    exit_code: int | None = None
    """With what it was about to exit; None: it was killed, or it was told to go."""
    told: bool = False
    """It was told to stop before it exited, so it may have exited because of that."""


@dataclass
class Order:
    """One workload as its user knows it: what was asked for, and what the answers were."""

    name: str
    key: str
    exit_code: int
    ids: set[str] = field(default_factory=set)
    """Every id that an answer gave; more than one is a violation."""
    refused: str | None = None
    """An answer that says that it was not accepted."""
    cancel_sent_s: float | None = None
    cancelled_s: float | None = None
    """When a cancellation was acknowledged."""


@dataclass(frozen=True)
class Killed:
    """A shim or a task that the harness killed or stopped for a while."""

    at_s: float
    pid: int
    run_id: str


@dataclass
class Observed:
    """All that a run is judged by."""

    runs: list[TaskRun] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    phases: dict[str, str] = field(default_factory=dict)
    """What the API says in the end, by id; workloads that nobody asked for are here too."""
    names: dict[str, str] = field(default_factory=dict)
    """The name of each of them."""
    reasons: dict[str, str] = field(default_factory=dict)
    killed: list[Killed] = field(default_factory=list)
    """Shims and tasks that the harness killed: their status may be unknown."""
    blackouts: list[tuple[float, float]] = field(default_factory=list)
    """Times in which machines could not be reached for so long that they may count as lost."""
    left_behind: list[str] = field(default_factory=list)
    """Processes after the stack was stopped."""
    withheld: list[str] = field(default_factory=list)
    """Machines that take no work at the end, although nobody asked for that."""
    stack_failures: list[str] = field(default_factory=list)
    """Times at which the stack did not come up, or ended by itself."""

    @property
    def live(self) -> list[str]:
        """Workloads that had not ended in the end."""
        return [id_ for id_, phase in self.phases.items() if phase not in ("succeeded", "failed", "cancelled")]


def read_journals(folder: Path) -> list[TaskRun]:
    """Every journal of a folder. A last line that is cut off is not counted; a process may be killed in its midst."""
    runs = []
    for path in sorted(folder.iterdir()):
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if line]
        if not lines or lines[0]["what"] != "start":
            continue
        workload, attempt, job, task = path.name.split(".")[:4]
        first = lines[0]
        loaded = next(((x["at_s"], x["step"]) for x in lines if x["what"] == "loaded"), None)
        ends = [x["exit_code"] for x in lines if x["what"] == "end"]
        runs.append(
            TaskRun(
                workload,
                int(attempt),
                job,
                int(task),
                first["machine"],
                tuple(first["slots"]),
                first["tasks"],
                first["pid"],
                first["at_s"],
                lines[-1]["at_s"],
                loaded,
                tuple((x["at_s"], x["step"]) for x in lines if x["what"] == "saved"),
                any(x["what"] == "preempted" for x in lines),
                ends[-1] if ends else None,
                any(x["what"] == "end" and x.get("told") for x in lines),
            )
        )
    return runs
