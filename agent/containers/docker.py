"""Docker's HTTP API on a Unix socket, which Podman offers, too. Uses the standard library only."""

import base64
import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from agent.containers.engine import Container, ContainerState, EngineError, EngineFacts, Image

_ANSWER_S = 60.0
_PULL_S = 300.0
"""An engine that says nothing for so long during a pull does not answer."""
_STDERR = 2
"""First byte of the header of output on stderr."""
_HEADER_BYTES = 8
"""Before each piece of output: its stream, and its size in the last 4 bytes."""
_CDI_KIND = "nvidia.com/gpu"
_CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
"""Where Podman looks for CDI devices."""


class DockerEngine:
    """The engine at a socket; see `agent.containers.engine.ContainerEngine`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def describe(self) -> EngineFacts:
        """Returns the properties of the engine."""
        info, version = self._json("GET", "/info"), self._json("GET", "/version")
        return EngineFacts(
            f"{_kind(version)} {version.get('Version', '')}".strip(),
            has_cgroup_parents=info.get("CgroupDriver") == "cgroupfs",
            why_unusable=_why_unusable(info.get("SecurityOptions") or ()),
        )

    def image(self, name: str) -> Image | None:
        """Returns an image on this machine; None: it does not exist here."""
        found = self._json("GET", f"/images/{quote(name)}/json", missing=True)
        if found is None:
            return None
        config = found.get("Config") or {}
        env = dict(one.partition("=")[::2] for one in config.get("Env") or ())
        return Image(
            found["Id"],
            env,
            tuple(config.get("Volumes") or ()),
            has_command=bool(config.get("Entrypoint") or config.get("Cmd")),
            size_bytes=int(found.get("Size") or 0),
        )

    def pull(self, name: str, login: tuple[str, str] | None, progress: Callable[[str], None]) -> None:
        """Fetches an image from its registry."""
        headers = {}
        if login is not None:
            body = {"username": login[0], "password": login[1], "serveraddress": name.partition("/")[0]}
            headers["X-Registry-Auth"] = base64.urlsafe_b64encode(json.dumps(body).encode()).decode()
        query = urlencode({"fromImage": name})
        with self._ask("POST", f"/images/create?{query}", headers=headers, timeout_s=_PULL_S) as answer:
            layers = dict[str, tuple[int, int]]()
            for line in _lines(answer):
                if "error" in line:
                    raise EngineError(f"cannot pull {name}: {line['error']}")
                detail = line.get("progressDetail") or {}
                if line.get("status") == "Downloading" and detail.get("total"):
                    layers[line.get("id", "")] = detail.get("current", 0), detail["total"]
                    done, total = (sum(pair[n] for pair in layers.values()) for n in (0, 1))
                    progress(f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")

    def remove_image(self, name: str) -> None:
        """Removes an image, unless a container uses it."""
        try:
            self._ask("DELETE", f"/images/{quote(name)}").close()
        except EngineError as error:
            if error.status != 404:
                raise

    def create(self, container: Container) -> str:
        """Makes a container and returns its id."""
        query = urlencode({"name": container.name})
        body = _body(container)
        if container.gpus:
            body["HostConfig"] |= self._gpus(container.gpus)
        return str(self._json("POST", f"/containers/create?{query}", body)["Id"])

    def output(self, name: str) -> Iterator[tuple[bool, bytes]]:
        """Yields pieces of the output of a container, each with whether it is of stderr."""
        answer = self._ask("POST", f"/containers/{name}/attach?stream=1&stdout=1&stderr=1", timeout_s=None)
        return _pieces(answer)

    def start(self, name: str) -> None:
        """Starts a container."""
        self._ask("POST", f"/containers/{name}/start").close()

    def wait(self, name: str) -> None:
        """Waits until a container does not run any more."""
        self._json("POST", f"/containers/{name}/wait?condition=not-running", timeout_s=None)

    def state(self, name: str) -> ContainerState | None:
        """Returns the state of a container; None: it does not exist."""
        found = self._json("GET", f"/containers/{name}/json", missing=True)
        if found is None:
            return None
        state = found["State"]
        return ContainerState(
            running=bool(state["Running"]),
            pid=int(state.get("Pid") or 0),
            exit_code=int(state.get("ExitCode") or 0),
            out_of_memory=bool(state.get("OOMKilled")),
            error=str(state.get("Error") or ""),
        )

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to the first process of a container, if it runs."""
        try:
            self._ask("POST", f"/containers/{name}/kill?signal={number}").close()
        except EngineError as error:
            if error.status not in (404, 409):
                raise

    def remove(self, name: str) -> None:
        """Kills and removes a container, if it exists."""
        try:
            self._ask("DELETE", f"/containers/{name}?force=1&v=1").close()
        except EngineError as error:
            if error.status not in (404, 409):  # 409: it is being removed already.
                raise

    def containers(self, labels: Mapping[str, str]) -> Sequence[Mapping[str, str]]:
        """Returns labels and names of containers."""
        filters = json.dumps({"label": [f"{name}={value}" for name, value in labels.items()]})
        found = self._json("GET", f"/containers/json?{urlencode({'all': 1, 'filters': filters})}")
        return [{**one["Labels"], "name": one["Names"][0].lstrip("/")} for one in found]

    def _gpus(self, ids: Sequence[str]) -> dict[str, Any]:
        """Returns the options for a container's GPUs: CDI devices if the machine describes them, else as `--gpus`."""
        if _kind(self._json("GET", "/version")) == "podman":
            if _has_cdi(_CDI_FOLDERS):
                return {"Devices": [{"PathOnHost": f"{_CDI_KIND}={one}"} for one in ids]}
        elif _has_cdi(self._json("GET", "/info").get("CDISpecDirs") or ()):
            return {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": [f"{_CDI_KIND}={one}" for one in ids]}]}
        return {"DeviceRequests": [{"DeviceIDs": list(ids), "Capabilities": [["gpu"]]}]}

    def _json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        missing: bool = False,
        timeout_s: float | None = _ANSWER_S,
    ) -> Any:
        """Returns the JSON answer. `missing`: status 404 gives None."""
        try:
            with self._ask(method, path, body, timeout_s=timeout_s) as answer:
                return json.load(answer)
        except EngineError as error:
            if missing and error.status == 404:
                return None
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EngineError(f"{method} {path.partition('?')[0]}: {error}") from None

    def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = _ANSWER_S,
    ) -> "_Answer":
        what = f"{method} {path.partition('?')[0]}"
        connection = _Connection(self._path, timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            if answer.status >= 400:
                text = answer.read().decode(errors="replace").strip()
                raise EngineError(_message(text) or f"{what}: status {answer.status}", answer.status)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineError(f"{what} at {self._path}: {error}") from None
        except EngineError:
            connection.close()
            raise
        return _Answer(connection, answer)


class _Answer:
    """An answer whose body is read as it arrives."""

    def __init__(self, connection: "_Connection", response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self.response = response

    def __enter__(self) -> http.client.HTTPResponse:
        return self.response

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self.response.close()
        self._connection.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("engine")
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(self._path)


def _kind(version: Mapping[str, Any]) -> str:
    components = {one.get("Name", "") for one in version.get("Components") or ()}
    return "podman" if any("Podman" in name for name in components) else "docker"


def _has_cdi(folders: Iterable[str]) -> bool:
    """Whether a file in `folders` describes NVIDIA's GPUs as CDI devices (`nvidia-ctk cdi generate`)."""
    for path in (path for folder in folders for path in Path(folder).glob("*.[jy]*")):
        with contextlib.suppress(OSError):
            if _CDI_KIND.encode() in path.read_bytes():
                return True
    return False


def _why_unusable(options: Sequence[str]) -> str | None:
    if not any("seccomp" in option for option in options):
        return "the engine has no seccomp profile"
    for kind in ("rootless", "userns"):
        if any(f"name={kind}" in option for option in options):
            return f"the engine maps user ids ({kind}), so tasks could not write the files of their tenant's user"
    return None


def _body(container: Container) -> dict[str, Any]:
    host: dict[str, Any] = {
        "NetworkMode": "host",
        "Init": True,  # The first process of a PID namespace gets no SIGTERM for which it has no handler.
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": True,
        "LogConfig": {"Type": "none"},
        "RestartPolicy": {"Name": "no"},
        "Mounts": [
            {"Type": "bind", "Source": source, "Target": place, "ReadOnly": not may_write}
            for place, (source, may_write) in container.mounts.items()
        ],
        "Tmpfs": dict(container.tmpfs),
        "GroupAdd": list(container.groups),
        "IpcMode": "shareable" if container.shares_with is None else f"container:{container.shares_with}",
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
    }
    if container.memory_bytes:
        host |= {"Memory": container.memory_bytes, "MemorySwap": container.memory_bytes}
    if container.processes:
        host["PidsLimit"] = container.processes
    if container.cpu_shares:
        host["CpuShares"] = container.cpu_shares
    if container.shm_bytes and container.shares_with is None:
        host["ShmSize"] = container.shm_bytes
    if container.cgroup_parent is not None:
        host["CgroupParent"] = container.cgroup_parent
    body: dict[str, Any] = {
        "Image": container.image,
        "Env": [f"{name}={value}" for name, value in container.env.items()],
        "WorkingDir": container.cwd,
        "User": container.user,
        "Labels": dict(container.labels),
        "AttachStdout": True,
        "AttachStderr": True,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    }
    if container.argv:
        body |= {"Entrypoint": list(container.argv), "Cmd": []}
    return body


def _pieces(answer: _Answer) -> Iterator[tuple[bool, bytes]]:
    # The connection is a raw stream after the headers, without a length. Closing it ends the loop.
    stream = answer.response.fp
    try:
        while len(header := stream.read(_HEADER_BYTES)) == _HEADER_BYTES:
            left = int.from_bytes(header[4:], "big")
            while left:
                piece = stream.read1(min(left, 1 << 16))
                if not piece:
                    return
                left -= len(piece)
                yield header[0] == _STDERR, piece
    except OSError:
        return
    finally:
        answer.close()


def _lines(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    try:
        for line in answer:
            if line.strip():
                yield json.loads(line)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise EngineError(f"the engine's answer ended early: {error}") from None


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text
