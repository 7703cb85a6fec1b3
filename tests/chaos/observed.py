"""Observations from outside: the tasks' journals, the responses that users got, and the actions of the harness."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.schedule import Elements


@dataclass(frozen=True)
class TaskRun:
    """One process of one task, as read from its journal. Times are seconds of CLOCK_BOOTTIME."""

    workload: str
    attempt: int
    job: str
    task: int
    machine: str
    slots: tuple[int, ...]
    tasks: int
    """The number of tasks of the job."""
    pid: int
    started_s: float
    last_s: float
    """Time of the last journal entry: the process was still alive then."""
    loaded: tuple[float, int] | None = None
    """The time when loading had ended, and the step that was loaded; None if loading did not end."""
    saved: tuple[tuple[float, int], ...] = ()
    """For each save: the time when it had returned, and its step."""
    preempted: bool = False
    exit_code: int | None = None
    """The exit code, recorded just before the exit; None if the task was killed or exited because of a preemption."""
    run_id: str = ""
    """The `MIZZEN_RUN_ID` of the task, or of the runner of the element."""
    told: bool = False
    """Whether the task was asked to stop before it exited; the stop may then be the reason of the exit."""


@dataclass(frozen=True)
class QueueSample:
    """What users saw of the queue and of the fleet at one instant."""

    scans: int
    """The number of scans of the queue since the start of the scheduler."""
    fits: frozenset[tuple[str, str]]
    """Each waiting workload, with each region that it may use and of which all GPUs were free."""


@dataclass(frozen=True)
class Element:
    """An element of an array at the end, as the API reports it."""

    phase: str
    why: str
    held: tuple[tuple[float, float], ...]
    """For each attempt, the times of its award and of its release."""


@dataclass(frozen=True)
class Array:
    """An array at the end, as the API reports it."""

    finished_s: float | None
    counts: dict[str, int]
    """The number of elements by final phase."""
    elements: dict[int, Element]
    """By index."""
    runners: tuple[tuple[float, float], ...] = ()
    """For each attempt of each of its runners, the times of its award and of its release."""


@dataclass
class Order:
    """One workload from its user's view: the request and its responses."""

    name: str
    key: str
    exit_code: int
    ids: set[str] = field(default_factory=set)
    """All ids that responses returned; more than one is a violation."""
    refused: str | None = None
    """A response that rejected the request."""
    after: tuple[str, str] | None = None
    """The name of the workload that it depends on, and the condition."""
    array: Elements | None = None
    same_index: bool = False
    """Whether its elements depend on those of the other one with the same index."""
    cancel_sent_s: float | None = None
    cancelled_s: float | None = None
    """Time at which a cancellation was acknowledged."""


@dataclass(frozen=True)
class Killed:
    """A shim or task that the harness killed or stopped for a while."""

    at_s: float
    pid: int
    run_id: str


@dataclass(frozen=True)
class Owned:
    """A period in which a machine, or some of its GPUs, were the owner's."""

    machine: str
    slots: tuple[int, ...] | None
    """None: the whole machine."""
    taken_s: float
    """When the owner asked for it."""
    free_s: float
    """When the owner had been told that no task runs there."""
    lent_s: float
    """When the owner was about to lend it again."""


@dataclass
class Observed:
    """All observations of a run, the input of the judge."""

    runs: list[TaskRun] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    phases: dict[str, str] = field(default_factory=dict)
    """Phase of each workload at the end, as reported by the API, including workloads that no user requested."""
    names: dict[str, str] = field(default_factory=dict)
    """The name of every workload at the end, by id."""
    reasons: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    """The arrays, by id."""
    killed: list[Killed] = field(default_factory=list)
    """Shims and tasks that the harness killed or stopped, so that their exit status may be unknown."""
    owned: list[Owned] = field(default_factory=list)
    samples: list[QueueSample] = field(default_factory=list)
    """The queue while the harness waits for the ends of all workloads, after the last fault."""
    blackouts: list[tuple[float, float]] = field(default_factory=list)
    """Periods in which machines were unreachable for so long that they may count as lost."""
    outages: list[tuple[float, float]] = field(default_factory=list)
    """Other periods in which a part was down without which the end of a task cannot be recorded."""
    left_behind: list[str] = field(default_factory=list)
    """Processes that remained after the stack was stopped."""
    withheld: list[str] = field(default_factory=list)
    """Machines that take no work or still hold slots at the end, although all faults and drains are over."""
    stack_failures: list[str] = field(default_factory=list)
    """Descriptions of the cases in which the stack did not start again, or ended by itself."""

    @property
    def live(self) -> list[str]:
        """The ids of the workloads that did not end."""
        return [id_ for id_, phase in self.phases.items() if phase not in ("succeeded", "failed", "cancelled")]


def read_journals(folder: Path) -> list[TaskRun]:
    """Reads all journals of a folder. An incomplete last line is ignored: a process may be killed while writing."""
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
                first["run_id"],
                any(x["what"] == "end" and x.get("told") for x in lines),
            )
        )
    return runs
