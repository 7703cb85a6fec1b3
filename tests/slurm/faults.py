"""Faults of pilots and of a Slurm cluster."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.observed import Observed
from tests.clusters.faults import ClusterFaults
from tests.slurm.cluster import OTHERS, SlurmCluster
from tests.stack.harness import Up

_LIVE = "running,pending,configuring,completing,suspended"


class SlurmFaults(ClusterFaults):
    """See `ClusterFaults`."""

    kinds = ("agent", "pilot", "scancel", "drain", "down", "preempt", "slurmctld", "mizzen")
    harmless = ("slurmctld", "mizzen")

    def __init__(self, slurm: SlurmCluster, up: Up, scratch: Path, seen: Observed, seed: int) -> None:
        super().__init__(up, scratch, seen, seed)
        self._slurm = slurm
        self._broken: list[str] = []
        """The nodes that a fault keeps down or drained, once for each fault."""

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

    def _tidy(self) -> None:
        """Kills what ended jobs have left, as Slurm does where it tracks processes by cgroups, and resumes nodes."""
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
