"""A Slurm cluster of one node on this computer, in a folder: munged, slurmctld and slurmd, with Slurm's defaults."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.stack.ports import free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo")
_PATIENCE_S = 60.0
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
MaxArraySize=20000
MaxJobCount=40000
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

        Raises:
            CalledProcessError: an element failed.
        """
        began_s = time.perf_counter()
        self._call("sbatch", "--wait", f"--array=0-{elements - 1}", "--output=/dev/null", "--wrap", "true")
        return time.perf_counter() - began_s

    def is_ready(self) -> bool:
        """Returns whether the node takes jobs."""
        return "idle" in self._call("sinfo", "-h", "-o", "%T", check=False)

    def _call(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self._env, cwd=self._folder, text=True, stdout=subprocess.PIPE, check=check)
        return done.stdout


@contextmanager
def slurm_cluster(folder: Path, slots: int) -> Iterator[SlurmCluster]:
    """Runs a cluster whose node has `slots` CPUs, in an empty folder.

    Raises:
        TimeoutError: it did not start; its logs are in the folder.
    """
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    config = {"host": socket.gethostname().partition(".")[0], "folder": folder, "slots": slots}
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
