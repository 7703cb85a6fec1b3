"""A container engine of its own for benches and tests, in a folder, and an image with busybox's shell."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.containers.docker import DockerEngine
from agent.containers.engine import EngineError

APPLETS = (
    "sh", "cat", "ls", "sleep", "id", "ps", "mount", "touch", "env", "true", "false", "kill", "dd", "grep", "tail",
    "test", "wc", "echo", "mkdir", "nc", "ln", "head", "hostname",
)  # fmt: skip
_STARTED_S = 60.0


class NoEngineError(Exception):
    """This machine cannot run a container engine of its own. The message says why."""


def why_no_engine(*programs: str) -> str | None:
    """Returns why this machine cannot run an engine that needs these programs; None: it may."""
    if os.geteuid() != 0:
        return "only root can run a container engine of its own"
    missing = [name for name in (*programs, "busybox") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@dataclass
class DockerHere:
    """A dockerd whose data, socket and pid file are in a folder."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    options: list[str] = field(default_factory=list)
    cgroup: str | None = None
    """A cgroup v2 in which the engine starts."""

    @property
    def socket(self) -> Path:
        """The engine's socket."""
        return self.folder / "docker.sock"

    @property
    def engine(self) -> DockerEngine:
        """A client of the engine."""
        return DockerEngine(str(self.socket))

    def start(self) -> None:
        """Starts the engine, and waits until it answers.

        Raises:
            NoEngineError: it cannot run on this machine.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        command, variables = self._command()
        if self.cgroup is not None:
            command = ["sh", "-c", 'echo 0 > "$0/cgroup.procs"; exec "$@"', self.cgroup, *command]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=log, start_new_session=True
            )
        give_up_s = time.monotonic() + _STARTED_S
        while True:
            with contextlib.suppress(EngineError):
                self.engine.describe()
                return
            if self.process.poll() is not None or time.monotonic() > give_up_s:
                self.stop()
                raise NoEngineError(f"{command[0]} does not run here: {(self.folder / 'log').read_text()[-500:]}")
            time.sleep(0.05)

    def _command(self) -> tuple[list[str], dict[str, str]]:
        (self.folder / "daemon.json").write_text("{}")
        return [
            "dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs",
            "--live-restore", "--exec-opt", "native.cgroupdriver=cgroupfs", "--config-file",
            str(self.folder / "daemon.json"), "--data-root", str(self.folder / "data"), "--exec-root",
            str(self.folder / "exec"), "-p", str(self.folder / "pid"), "-H", f"unix://{self.socket}", *self.options,
        ], {}  # fmt: skip

    def stop(self) -> None:
        """Ends the engine. With `--live-restore`, containers continue."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def load(
        self, name: str, config: dict[str, Any] | None = None, *, bare: bool = False, extra: Path | None = None
    ) -> None:
        """Makes an image with busybox as its shell, without Python, and with the file `extra` as `/extra`.

        `bare`: it gets the machine's `/usr` as a mount.
        """
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w") as tar:
            for folder in (
                "tmp",
                "var",
                "var/tmp",
                "etc",
                "dev",
                "proc",
                "sys",
                "run",
                "sbin",
                "usr" if bare else "bin",
            ):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if "tmp" in folder else 0o755
                tar.addfile(entry)
            if bare:
                for link in ("bin", "lib", "lib64"):  # The engine puts its init into /sbin.
                    entry = tarfile.TarInfo(link)
                    entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{link}"
                    tar.addfile(entry)
            else:
                tar.add(str(shutil.which("busybox")), "bin/busybox")
            for applet in () if bare else APPLETS:
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
            if extra is not None:
                tar.add(extra, "extra")
        self._import(name, config, body)

    def _import(self, name: str, config: dict[str, Any] | None, body: io.BytesIO) -> None:
        changes = [
            f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in (config or {}).items()
        ]
        command = ["import", *(part for change in changes for part in ("--change", change)), "-", name]
        self.docker(*command, stdin=body.getvalue())

    def docker(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Runs Docker's own command, where the tests need more than mizzen uses."""
        done = subprocess.run(
            ["docker", "-H", f"unix://{self.socket}", *arguments], input=stdin, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()


_PODMAN = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=1024:1024"]
"""
"""Settings with which Podman runs also on machines with cgroup v1."""


class PodmanHere(DockerHere):
    """Podman's service for Docker's API, whose data and socket are in a folder."""

    def _command(self) -> tuple[list[str], dict[str, str]]:
        settings = self.folder / "containers.conf"
        settings.write_text(_PODMAN)
        return [
            "podman", "--root", str(self.folder / "data"), "--runroot", str(self.folder / "exec"),
            "--storage-driver=vfs", "system", "service", "--time=0", f"unix://{self.socket}",
        ], {"CONTAINERS_CONF": str(settings)}  # fmt: skip


@contextlib.contextmanager
def podman() -> Iterator[DockerHere]:
    """Runs Podman's service, as `dockerd`."""
    if (why := why_no_engine("podman", "runc")) is not None:
        raise NoEngineError(why)
    with _running(PodmanHere(_folder())) as here:
        yield here


@contextlib.contextmanager
def dockerd(*options: str, cgroup: str | None = None) -> Iterator[DockerHere]:
    """Runs dockerd, in a cgroup v2 if `cgroup` is one.

    Raises:
        NoEngineError: this machine has none, or it cannot run here.
    """
    if (why := why_no_engine("dockerd", "containerd", "runc")) is not None:
        raise NoEngineError(why)
    with _running(DockerHere(_folder(), options=list(options), cgroup=cgroup)) as here:
        yield here


def _folder() -> Path:
    """Returns a new folder with a short path, because paths of sockets have at most 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="mz-"))


@contextlib.contextmanager
def _running(here: DockerHere) -> Iterator[DockerHere]:
    folder = here.folder
    try:
        here.start()
        yield here
    finally:
        with contextlib.suppress(EngineError):
            for one in here.engine.containers({}):
                here.engine.remove(one["name"])
        here.stop()
        for mount in sorted(Path("/proc/mounts").read_text().split("\n"), reverse=True):
            if (point := mount.split(" ")[1:2]) and point[0].startswith(f"{folder}/"):
                subprocess.run(["umount", "-l", point[0]], check=False)
        subprocess.run(["rm", "-rf", "--one-file-system", folder], check=False)
