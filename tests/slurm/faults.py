"""Faults of pilots, of a Slurm cluster and of mizzen's processes, one after the other, in a random order."""

import contextlib
import heapq
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from tests.chaos.faults import BLACKOUT_S, Faults, now_s
from tests.chaos.observed import Observed
from tests.chaos.schedule import Fault
from tests.slurm.cluster import OTHERS, SlurmCluster
from tests.stack.harness import Up

KINDS = ("agent", "pilot", "scancel", "drain", "down", "preempt", "slurmctld", "mizzen")
_PARTS = ("worker", "api", "gateway", "temporal", "postgres", "backend")
_PATIENCE_S = 120.0
_LIVE = "running,pending,configuring,completing,suspended"


class SlurmFaults:
    """Injects the faults, and ends each after some seconds."""

    def __init__(self, slurm: SlurmCluster, up: Up, scratch: Path, seen: Observed, seed: int) -> None:
        self._slurm, self._seen = slurm, seen
        self._chance = random.Random(seed)
        self._own = Faults(up, scratch, seen, lambda: None)
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._broken: list[str] = []
        """The nodes that a fault keeps down or drained, once for each fault."""
        self._stop = threading.Event()
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self.done: Counter[str] = Counter()

    def run(self, each: int, every_s: float) -> None:
        """Injects `each` faults of each kind, with a mean of `every_s` between two, and waits for the end of all."""
        self._reaper.start()
        kinds = [kind for kind in KINDS for _ in range(each)]
        self._chance.shuffle(kinds)
        for kind in kinds:
            self._pause(self._chance.expovariate(1 / every_s))
            give_up_s = time.monotonic() + _PATIENCE_S
            while not self._begin(kind):
                assert time.monotonic() < give_up_s, f"{kind}: for {_PATIENCE_S:.0f} s there was nothing to hit"
                self._pause(0.5)
            self.done[kind] += 1
        while self._ends:
            self._pause(0.5)

    def close(self) -> None:
        """Ends the thread that removes what ended jobs have left."""
        self._stop.set()
        self._reaper.join()

    def _pause(self, for_s: float) -> None:
        """Waits, and ends the faults that are due."""
        until_s = time.monotonic() + for_s
        while True:
            while self._ends and self._ends[0][0] <= time.monotonic():
                end = heapq.heappop(self._ends)[2]
                try:
                    end()
                except AssertionError:  # The controller is away.
                    self._later(1.0, end)
            if time.monotonic() >= until_s:
                return
            time.sleep(0.1)

    def _later(self, for_s: float, end: Callable[[], None]) -> None:
        heapq.heappush(self._ends, (time.monotonic() + for_s, next(self._numbers), end))

    def _begin(self, kind: str) -> bool:
        """Begins a fault; False: there is nothing to hit now, or the controller is away."""
        with contextlib.suppress(AssertionError, ProcessLookupError):
            at_s = now_s()
            hit = getattr(self, f"_{kind}")()
            if hit and kind not in ("slurmctld", "mizzen"):  # Machines may count as lost before an end is recorded.
                self._seen.blackouts.append((at_s, now_s() + BLACKOUT_S))
            return bool(hit)
        return False

    # ---------------------------------------------------------------------------------------------------------- pilots

    def _job(self, states: str = "running") -> tuple[str, str] | None:
        """Returns a pilot's job and its node, by chance."""
        lines = self._slurm.command("squeue", "-h", "-t", states, "-o", "%i %N %j").splitlines()
        jobs = [line.split()[:2] for line in lines if line.split()[-1].startswith("in-")]
        return tuple(self._chance.choice(jobs)) if jobs else None  # type: ignore[return-value]

    def _agent(self) -> bool:
        """The agent dies, and with it the job."""
        if (job := self._job()) is None:
            return False
        agents = [pid for pid, of, said in self._processes() if of == job[0] and b"\0--state-dir\0" in said]
        if not agents:
            return False
        os.kill(min(agents), signal.SIGKILL)
        return True

    def _pilot(self) -> bool:
        """All processes of the job die."""
        if (job := self._job()) is None:
            return False
        self._slurm.command("scancel", "--full", "--signal=KILL", job[0])
        return True

    def _scancel(self) -> bool:
        """A job is cancelled, whether it runs or waits."""
        if (job := self._job("running,pending")) is None:
            return False
        self._slurm.command("scancel", job[0])
        return True

    # ----------------------------------------------------------------------------------------------------------- nodes

    def _drain(self) -> bool:
        node = self._node()
        self._slurm.command("scontrol", "update", f"nodename={node}", "state=drain", "reason=its fan")
        self._broken.append(node)
        self._later(self._chance.uniform(2, 12), lambda: self._broken.remove(node))
        return True

    def _down(self) -> bool:
        """A node loses power."""
        if (job := self._job()) is None or job[1] not in self._slurm.running_nodes():
            return False
        node = job[1]
        self._slurm.kill(node)
        there = self._slurm.command("squeue", "-h", "-t", _LIVE, "-w", node, "-o", "%i").split()
        self._slurm.command("scontrol", "update", f"nodename={node}", "state=down", "reason=no power")
        self._kill(set(there))
        self._broken.append(node)
        self._later(self._chance.uniform(2, 8), lambda: self._start_node(node))
        return True

    def _node(self) -> str:
        job = self._job()
        return self._chance.choice(self._slurm.nodes) if job is None else job[1]

    def _start_node(self, node: str) -> None:
        self._slurm.start_node(node)
        self._broken.remove(node)

    # --------------------------------------------------------------------------------------------------------- others

    def _preempt(self) -> bool:
        """A job of a higher partition takes a node for a moment."""
        if self._job() is None:
            return False
        self._slurm.command(
            "sbatch", "--partition=urgent", "--nodes=1", "--exclusive", "--time=1", "--chdir=/", "--output=/dev/null",
            f"--job-name={OTHERS}", "--wrap=sleep 2",
        )  # fmt: skip
        return True

    def _slurmctld(self) -> bool:
        if not self._slurm.has_controller():
            return False
        self._slurm.kill("slurmctld")
        self._later(self._chance.uniform(0, 8), self._slurm.start_controller)
        return True

    def _mizzen(self) -> bool:
        """One of mizzen's own processes dies."""
        part, before = self._chance.choice(_PARTS), len(self._own.done)
        self._own.begin(Fault(0.0, f"kill-{part}", self._chance.random()))
        return len(self._own.done) > before

    # ------------------------------------------------------------------------------------------------------- processes

    def _processes(self) -> Iterator[tuple[int, str, bytes]]:
        """Yields the processes of pilots, each with the number of its job and its command line."""
        ours = re.compile(re.escape(f"{self._slurm.folder}/mizzen-").encode() + rb"(\d+)")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                said = _read(int(entry.name), "cmdline")
                if (found := ours.search(said) or ours.search(_read(int(entry.name), "environ"))) is not None:
                    yield int(entry.name), found[1].decode(), said

    def _kill(self, jobs: set[str]) -> None:
        for pid, job, _ in self._processes():
            if job in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Kills what ended jobs have left, as Slurm does where it tracks processes by cgroups, and resumes nodes."""
        while not self._stop.wait(1.0):
            with contextlib.suppress(AssertionError):
                # Also nodes that a controller drained because it forgot jobs and gave their numbers to others.
                for node, state in self._slurm.states().items():
                    if node not in self._broken and state.rstrip("*") in ("down", "drain", "drng"):
                        self._slurm.command("scontrol", "update", f"nodename={node}", "state=resume")
                left = {job for _, job, _ in self._processes()}
                self._kill(left - set(self._slurm.command("squeue", "-h", "-t", _LIVE, "-o", "%i").split()))


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
