"""A Slurm cluster of one node on this computer, in a folder: munged, slurmctld and slurmd."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness import InvalidBenchmark
from infra.stack.ports import free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo")
_PATIENCE_S, _LONGEST_S, _LOOK_S = 60.0, 900.0, 0.05
TUNED = "batch_sched_delay=0,sched_interval=1,default_queue_depth=1000"
"""SchedulerParameters for many short jobs, as in Slurm's guide for high throughput. The backfill scheduler and all else
keep their defaults."""
_CONFIG = """
ClusterName=bench
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MaxArraySize=10001
MaxJobCount=40000
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/ended
{scheduler}
SlurmdParameters=config_overrides
NodeName={host} CPUs={slots} State=UNKNOWN
PartitionName=bench Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """Returns why this computer cannot run a cluster; None: it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian's slurm-wlm and munge)"
    return None if os.geteuid() == 0 else "only root can start slurmctld with tasks of any user"


class SlurmCluster:
    """A running cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run_array(self, elements: int) -> float:
        """Returns the seconds from the submission of an array of `true` to the end of its last element.

        The end of an element is when Slurm writes its record, which costs nothing more: `sbatch --wait` looks only
        every some seconds, and `squeue` in a loop would slow the controller down.

        Raises:
            CalledProcessError: the array was refused.
            InvalidBenchmark: an element failed.
            TimeoutError: it takes longer than 15 minutes.
        """
        ended = self._folder / "ended"
        before = len(ended.read_bytes()) if ended.exists() else 0
        began_s = time.perf_counter()
        self._call("sbatch", f"--array=0-{elements - 1}", "--output=/dev/null", "--wrap", "true")
        while (done := ended.read_bytes()[before:] if ended.exists() else b"").count(b"\n") < elements:
            if time.perf_counter() - began_s > _LONGEST_S:
                raise TimeoutError(f"{done.count(b'COMPLETED')} of {elements} elements ended in {_LONGEST_S} s")
            time.sleep(_LOOK_S)
        took_s = time.perf_counter() - began_s
        if done.count(b"JobState=COMPLETED") != elements:
            raise InvalidBenchmark("an element failed in Slurm")
        return took_s

    def is_ready(self) -> bool:
        """Returns whether the node takes jobs."""
        return "idle" in self._call("sinfo", "-h", "-o", "%T", check=False)

    def _call(self, *command: str, check: bool = True) -> str:
        errors = None if check else subprocess.DEVNULL
        done = subprocess.run(
            command, env=self._env, cwd=self._folder, text=True, stdout=subprocess.PIPE, stderr=errors, check=check
        )
        return done.stdout


@contextmanager
def slurm_cluster(folder: Path, slots: int, scheduler: str = "") -> Iterator[SlurmCluster]:
    """Runs a cluster whose node has `slots` CPUs, in an empty folder. `scheduler` are its SchedulerParameters.

    Raises:
        TimeoutError: it did not start; its logs are in the folder.
    """
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    config = {"host": socket.gethostname().partition(".")[0], "folder": folder, "slots": slots}
    config["scheduler"] = f"SchedulerParameters={scheduler}" if scheduler else ""
    (folder / "slurm.conf").write_text(_CONFIG.format(controller=free_port(), daemon=free_port(), **config))
    cluster = SlurmCluster(folder)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
    ]  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in (munge, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", str(config["host"])]):
            running.append(subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL))  # fmt: skip
            time.sleep(0.5)
        give_up_s = time.monotonic() + _PATIENCE_S
        while not cluster.is_ready():
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"slurm did not start: see {folder}")
            time.sleep(0.2)
        yield cluster
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()
