"""The actions of the owners, in order, while the trainings run."""

import contextlib
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from agent.processes import ProcessIdentity
from mizzen.checkpoint import list_committed
from rigs.demos.lending.installation import MACHINES, SAVE_S, TRAININGS, DemoSite
from rigs.demos.lending.steps import StepLine, read_lines
from tests.stack.harness import owner_says, processes_of, wait_until

_POLL_S = 0.002
Say = Callable[[str], None]


@dataclass
class Word:
    """A command of an owner about a machine, and its result. Times are seconds since the epoch."""

    machine: str
    arguments: tuple[str, ...]
    """The command with its flags."""
    said_s: float
    gpus: tuple[int, ...]
    """The GPUs that the command names."""
    notice_s: float | None = None
    """The notice, 0 for none; None: the owner lends."""
    answered_s: float = 0.0
    """When the command had ended."""
    gone_s: float | None = None
    """When none of the tasks that ran on these GPUs had a living process; None: the command ended before."""
    left: tuple[int, ...] = ()
    """Pids of processes of tasks on these GPUs that lived when the command had ended."""
    free: bool = False
    """Whether the command said that the GPUs are free."""
    moved: dict[str, int] = field(default_factory=dict)
    """The trainings that had to leave, each with its attempt."""
    stored: dict[str, int | None] = field(default_factory=dict)
    """The step of the newest checkpoint of these attempts in their building's store, when the command had ended."""
    arrived: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """For each training that had to leave: its next machine, and the newest step that the next attempt had saved in the
    store of that machine's building."""
    strayed: int = 0
    """Number of trainings whose next attempt had saved in the store of the building that they left."""

    @property
    def text(self) -> str:
        """The command as in the picture."""
        return " ".join(self.arguments)


@dataclass
class LendingCourse:
    """The events of a run."""

    began_s: float = 0.0
    ended_s: float = 0.0
    words: list[Word] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    """Events that concern no machine."""
    holds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The allocations of each training, from the API."""
    lines: dict[str, list[list[StepLine]]] = field(default_factory=dict)
    """What each rank of each training wrote."""
    expected: dict[str, list[StepLine]] = field(default_factory=dict)
    """What the first rank of each training wrote in an uninterrupted run."""
    exit_code: int = -1
    """Exit code of `mizzen up`, after Ctrl-C at the end."""
    left: dict[int, str] = field(default_factory=dict)
    """Processes of the stack that lived after its end."""


def tasks_on(machine: str, gpus: Collection[int]) -> tuple[int, ...]:
    """Returns the pids of living processes of tasks on these GPUs of a machine, which their environments name."""
    wanted = {f"CUDA_VISIBLE_DEVICES={gpu}".encode() for gpu in gpus}
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            environ = set((entry / "environ").read_bytes().split(b"\0")) if entry.name.isdigit() else set()
            if f"MIZZEN_MACHINE={machine}".encode() in environ and environ & wanted:
                found.append(int(entry.name))
    return tuple(found)


class LendingDemoScenario:
    """Runs the trainings while owners take machines back and lend them again.

    `pause_s` is the time between two events.
    """

    def __init__(self, site: DemoSite, pause_s: float, say: Say) -> None:
        self._site, self._pause_s, self._say = site, pause_s, say
        self._ids: dict[str, str] = {}
        self.course = LendingCourse()

    def run(self) -> LendingCourse:
        """Runs everything, stops the stack, and returns what happened.

        Raises:
            AssertionError: an expected event did not happen in time.
        """
        up, course = self._site.up, self.course
        up.client().set_tenant("t", 3, {"lab": 8, "pc": 4}, None)
        for name in ("lab", "pc"):
            owner_says(up, f"campus/chemistry/{name}", "reclaim", "--now")
        course.began_s = time.time()
        course.words += [
            Word(f"campus/chemistry/{name}", ("reclaim", "--now"), course.began_s, tuple(range(gpus)), 0.0)
            for name, gpus in (("lab", 4), ("pc", 2))
        ]
        for training in TRAININGS:
            self._ids[training.name] = str(up.client().submit(self._site.document(training))["id"])
        self._say("five trainings are submitted; only the machines in physics are lent")
        self._until_saved(dict.fromkeys(self._ids, 1))
        self._pause()
        self._owners()
        self._pause()
        self._site.gate.touch()
        self._say("the trainings may end")
        wait_until(lambda: all(up.ended(one) for one in self._ids.values()), "all trainings end")
        course.ended_s = time.time()
        self._collect()
        return course

    def _owners(self) -> None:
        """Owners lend and take back. A training moves to the other building, since no other GPU of its type is free."""
        self._lend(("chemistry/lab", ()), ("chemistry/pc", ()))
        self._take(("physics/pc",), "--notice", "20s")
        self._take(("physics/lab",), "--notice", "20s", "--gpus", "0")
        self._lend(("physics/pc", ()))
        self._take(("chemistry/pc",), "--now")
        self._lend(("chemistry/pc", ()))
        self._lend(("physics/lab", ("--gpus", "0")))
        self._take(("chemistry/lab",), "--notice", "20s", while_taking=self._kill_worker)
        self._lend(("chemistry/lab", ()))
        self._take(("physics/lab", "physics/pc"), "--notice", "20s")
        self._lend(("physics/lab", ()), ("physics/pc", ()))

    # --------------------------------------------------------------------------------------------------------- steps

    def _take(self, places: Collection[str], *flags: str, while_taking: Callable[[], None] | None = None) -> None:
        """Lets owners take machines or GPUs back; returns when the trainings have saved elsewhere."""
        with ThreadPoolExecutor() as threads:
            taken = [threads.submit(self._one_takes, f"campus/{place}", flags) for place in places]
            if while_taking is not None:
                while_taking()
            words = [one.result() for one in taken]
        self._until_saved({name: attempt + 1 for word in words for name, attempt in word.moved.items()})
        for word in words:
            for name, attempt in word.moved.items():
                now = self._lines()[name][0][-1].machine
                word.arrived[name] = (now, self._stored(now, name, attempt + 1))
                word.strayed += self._stored(word.machine, name, attempt + 1) is not None
        self._pause()

    def _one_takes(self, machine: str, flags: tuple[str, ...]) -> Word:
        gpus = tuple(range(MACHINES[machine]))
        if "--gpus" in flags:
            gpus = tuple(map(int, flags[flags.index("--gpus") + 1].split(",")))
        notice_s = float(flags[flags.index("--notice") + 1].rstrip("s")) if "--notice" in flags else 0.0
        here = {
            name: lines
            for name, ranks in self._lines().items()
            if (lines := [rank[-1] for rank in ranks if rank[-1].machine == machine and rank[-1].gpu in gpus])
        }
        if not notice_s:
            self._until_between_saves(here)
        processes = [ProcessIdentity.of(line.pid) for lines in here.values() for line in lines]
        word = Word(machine, ("reclaim", *flags), time.time(), gpus, notice_s)
        word.moved = {name: lines[0].attempt for name, lines in here.items()}
        self.course.words.append(word)
        self._say(f"the owner of {machine} says `mizzen {word.text}`; {', '.join(here)} must leave")
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(owner_says, self._site.up, machine, *word.arguments)
            while not answer.done():
                if word.gone_s is None and not any(one.alive() for one in processes):
                    word.gone_s = time.time()
                time.sleep(_POLL_S)
            word.answered_s, word.free = time.time(), bool(answer.result()["free"])
        word.left = tasks_on(machine, gpus)
        word.stored = {name: self._stored(machine, name, attempt) for name, attempt in word.moved.items()}
        self._say(f"{machine}: free after {word.answered_s - word.said_s:.2f} s")
        return word

    def _until_between_saves(self, names: Collection[str]) -> None:
        """Waits until the newest checkpoint of each training is at least half an interval old."""

        def old(name: str) -> bool:
            saved = [line.at_s for line in self._lines()[name][0] if line.event == "saved"]
            return SAVE_S / 2 < time.time() - saved[-1] < 0.75 * SAVE_S

        wait_until(lambda: all(map(old, names)), "the newest checkpoints are not new")

    def _stored(self, machine: str, name: str, attempt: int) -> int | None:
        """Returns the newest step that an attempt has saved in the store of a machine's building."""
        found = list_committed(self._site.store(machine, self._ids[name]))
        return max((one.step for one in found if one.attempt == attempt), default=None)

    def _lend(self, *places: tuple[str, tuple[str, ...]]) -> None:
        for place, flags in places:
            machine = f"campus/{place}"
            gpus = tuple(map(int, flags[1].split(","))) if flags else tuple(range(MACHINES[machine]))
            self.course.words.append(Word(machine, ("lend", *flags), time.time(), gpus))
            self._say(f"the owner of {machine} says `mizzen {self.course.words[-1].text}`")
            owner_says(self._site.up, machine, "lend", *flags)
        for place, _ in places:
            wait_until(partial(self._site.up.takes_work, f"campus/{place}"), f"{place} takes work again")
        self._pause()

    def _kill_worker(self) -> None:
        before = self._workers()
        wait_until(lambda: self.course.words[-1].notice_s is not None, "the owner says it")
        self._site.up.kill(" worker ")
        self.course.events.append((time.time(), "worker: kill -9"))
        self._say("SIGKILL to the worker, while the reclaim continues")
        wait_until(lambda: self._workers() - before, "the worker runs again")

    def _workers(self) -> set[int]:
        return {pid for pid, command in processes_of(self._site.up.data).items() if " worker " in command}

    def _pause(self) -> None:
        time.sleep(self._pause_s)

    def _lines(self) -> dict[str, list[list[StepLine]]]:
        return {one.name: read_lines(self._site.steps / one.name, one.tasks) for one in TRAININGS}

    def _until_saved(self, attempts: dict[str, int]) -> None:
        """Waits until each of these attempts has saved a checkpoint."""

        def saved(name: str) -> bool:
            return any(line.event == "saved" and line.attempt == attempts[name] for line in self._lines()[name][0])

        wait_until(lambda: all(map(saved, attempts)), f"these trainings save: {attempts}")

    def _collect(self) -> None:
        """Reads the data for the report, and stops the stack."""
        up, course = self._site.up, self.course
        course.holds = {name: [dict(hold) for hold in up.client().allocations(one)] for name, one in self._ids.items()}
        course.lines = self._lines()
        course.exit_code = up.interrupt()
        course.left = processes_of(up.data)
        self._say(f"stopped with exit code {course.exit_code}; the trainings run again without interruption")
        again = self._site.uninterrupted({name: ranks[0][-1].step for name, ranks in course.lines.items()})
        course.expected = {name: read_lines(again / name, 1)[0] for name in course.lines}
