"""A Slurm cluster on loopback: munged, slurmctld and several slurmd on free ports, in a temporary folder."""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.stack.ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "munged")
PARTITIONS = """
PartitionName=batch Nodes=ALL Default=YES State=UP MaxTime=1-0 PriorityTier=1 PreemptMode=CANCEL GraceTime={grace_s}
PartitionName=urgent Nodes=ALL State=UP MaxTime=1-0 PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Returns why no cluster can run on this computer; None: it can."""
    for program in PROGRAMS:
        if shutil.which(program, path=_PATH) is None:
            return f"the program {program} is not installed"
    return None if os.geteuid() == 0 else "slurmd needs root"


def rest_missing() -> str | None:
    """Returns why no slurmrestd with JWT can run on this computer; None: it can."""
    if shutil.which("slurmrestd", path=_PATH) is None:
        return "the program slurmrestd is not installed"
    return None if _plugin("auth_jwt") else "the plugin auth/jwt is not installed (Debian: slurm-wlm-jwt-plugin)"


def _plugin(name: str) -> bool:
    return any(Path("/usr/lib").glob(f"*/slurm-wlm/{name}.so"))


def _version() -> tuple[int, ...]:
    said = subprocess.run(
        ["slurmd", "-V"], env={**os.environ, "PATH": _PATH}, capture_output=True, text=True, check=True
    )
    return tuple(int(part) for part in said.stdout.split()[-1].split(".")[:2])


OTHERS = "urgent"
"""The name of jobs that tests submit and that are no pilots."""
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
{jwt}
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0,preempt_youngest_first
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
{user_signal}
GresTypes=gpu
KillWait=5
MinJobAge={min_job_age_s}
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=10
InactiveLimit=0
Waittime=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
EnforcePartLimits=ALL
{nodes}
{partitions}
"""


class SlurmCluster:
    """The cluster. Its nodes are `n1` to `nN`, each with 4 CPUs, 4 GiB of memory and 2 fake GPUs."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        min_job_age_s: int = 300,
        grace_s: int = 20,
        user_signal: bool = True,
        rest: bool = False,
    ) -> None:
        """Writes the configuration. `folder` must be new; its path must be short, because it has a socket.

        `user_signal`: whether the signal of `--signal` is also sent at a preemption. `rest`: slurmrestd runs, too.
        """
        self.folder, self._rest, self._rest_port = folder, rest, free_port()
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self.conf = folder / "slurm.conf"
        folder.mkdir(mode=0o755, exist_ok=True)
        (folder / "state").mkdir()
        gres = []
        for gpu in range(2):
            os.mknod(device := folder / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # As /dev/null.
            gres.append(f"Name=gpu Type=a100 File={device}\n")
        (folder / "gres.conf").write_text("".join(gres))
        if _version() >= (23, 2):  # Else slurmd looks for systemd. Earlier versions do not know this value.
            (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        lines = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=4096"
            f" Gres=gpu:a100:2 State=UNKNOWN"
            for name in self.nodes
        ]
        self.port = free_port()
        self.conf.write_text(
            _CONF.format(
                folder=folder, port=self.port, nodes="\n".join(lines), partitions=PARTITIONS.format(grace_s=grace_s),
                min_job_age_s=min_job_age_s,
                jwt=f"AuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key={folder}/jwt.key" if rest else "",
                user_signal="SlurmctldParameters=preempt_send_user_signal" if user_signal else "",
            )
        )  # fmt: skip
        self.environ = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": _PATH}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts all daemons, and waits until all nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._run(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/munge.seed",
            f"--log-file={self.folder}/munged.log", "--num-threads=1",
        )  # fmt: skip
        (jwt := self.folder / "jwt.key").write_bytes(os.urandom(32))
        jwt.chmod(0o600)
        while not (self.folder / "munge.socket").exists():
            time.sleep(0.02)
        self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        self.until(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "all nodes are idle", 10.0)
        if self._rest:
            self._start_rest()

    @property
    def rest(self) -> dict[str, str]:
        """The settings with which a provider uses slurmrestd."""
        version = "v0.0.38" if _plugin("openapi_v0_0_38") else "v0.0.42"
        url = f"http://127.0.0.1:{self._rest_port}/slurm/{version}"
        return {"url": url, "user": "root", "token_file": str(self.folder / "token")}

    def _start_rest(self) -> None:
        (self.folder / "token").write_text(self.command("scontrol", "token", "lifespan=36000"))
        plugins = ["-s", "openapi/v0.0.38"] if _plugin("openapi_v0_0_38") else ["-s", "slurmctld", "-d", "v0.0.42"]
        self._run(
            "slurmrestd", "-u", "nobody", "-g", "nogroup", "-a", "rest_auth/jwt", *plugins,
            f"127.0.0.1:{self._rest_port}", more={"SLURM_JWT": "daemon"},
        )  # fmt: skip

        def listens() -> bool:
            with socket.socket() as to:
                return not to.connect_ex(("127.0.0.1", self._rest_port))

        self.until(listens, "slurmrestd listens")

    def start_controller(self) -> None:
        """Starts slurmctld. It continues with the state of the previous one."""
        self._run("slurmctld", "-D", "-i")

    def start_node(self, name: str, without: Path | None = None) -> None:
        """Starts the slurmd of a node. `without`: a folder that is empty there, as one that nodes do not share."""
        hidden = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(without)]
        self._run(*(hidden if without else []), "slurmd", "-D", "-N", name, label=name)

    def kill(self, label: str) -> None:
        """Kills a daemon: `slurmctld`, or the slurmd of the node with this name."""
        process = self._processes.pop(label)
        process.kill()
        process.wait()

    def freeze(self, label: str, *, thaw: bool = False) -> None:
        """Stops a daemon, which then accepts connections and never answers; or lets it continue."""
        self._processes[label].send_signal(signal.SIGCONT if thaw else signal.SIGSTOP)

    def kill_saved_controller(self) -> None:
        """Kills slurmctld after it has saved all jobs until now, which takes it some seconds."""
        mark, state = f"saved-{time.monotonic_ns()}", self.folder / "state" / "job_state"
        job = self.command(
            "sbatch", "--parsable", "--hold", "--chdir=/", "--output=/dev/null", f"--job-name={OTHERS}",
            f"--comment={mark}", "--wrap=true",
        )  # fmt: skip
        self.until(lambda: mark.encode() in state.read_bytes(), "the controller has saved its state")
        self.command("scancel", job)
        self.kill("slurmctld")

    def stop_controller(self) -> None:
        """Ends slurmctld after it has saved its state. One that is killed forgets jobs of the last seconds."""
        process = self._processes.pop("slurmctld")
        process.terminate()
        process.wait()

    def running_nodes(self) -> list[str]:
        """Returns the nodes whose slurmd runs."""
        return [name for name in self.nodes if name in self._processes]

    def has_controller(self) -> bool:
        """Returns whether slurmctld runs."""
        return "slurmctld" in self._processes

    def command(self, *words: str) -> str:
        """Runs a command of Slurm; returns what it prints.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """Returns the state of each node."""
        lines = self.command("sinfo", "-h", "-N", "-p", "batch", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)  # type: ignore[misc]

    def jobs(self) -> dict[str, list[str]]:
        """Returns the ids of the jobs that have not ended and are none of `OTHERS`, by name."""
        out: dict[str, list[str]] = {}
        for line in self.command("squeue", "-h", "-o", "%j %i").splitlines():
            name, job = line.split()
            if name != OTHERS:
                out.setdefault(name, []).append(job)
        return out

    def until(self, holds: object, what: str, timeout_s: float = 60.0) -> None:
        """Waits until `holds` returns a true value.

        Raises:
            AssertionError: it did not within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                if holds():  # type: ignore[operator]
                    return
            assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
            time.sleep(0.2)

    def stop(self) -> None:
        """Cancels all jobs, then ends all daemons and the processes of the jobs."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.command("scancel", "--user=root", "--full", "--signal=KILL")
        for label in ("slurmrestd", "slurmctld", *self.nodes, "munged"):
            if label in self._processes:
                self.kill(label)
        needle = f"SLURM_CONF={self.conf}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                own = entry.name == str(os.getpid())
                if entry.name.isdigit() and not own and needle in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), 9)

    def _run(self, program: str, *arguments: str, label: str | None = None, more: dict[str, str] | None = None) -> None:
        with (self.folder / f"{label or program}.out").open("ab") as out:
            path = shutil.which(program, path=_PATH) or program
            self._processes[label or program] = subprocess.Popen(
                [path, *arguments], env={**self.environ, **(more or {})}, stdout=out, stderr=out, start_new_session=True
            )


@contextlib.contextmanager
def cluster(nodes: int = 2, **options: Any) -> Iterator[SlurmCluster]:
    """Yields a running cluster in a new folder directly below the system's temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="sl-"))
    made = SlurmCluster(folder / "c", nodes, **options)
    folder.chmod(0o755)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)
