"""The interface of container engines. Uses the standard library only, because the shim imports this module."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

RUN_LABEL, MACHINE_LABEL, FOLDER_LABEL = "mizzen.run", "mizzen.machine", "mizzen.folder"
"""Labels of containers: run id of the task, id of the machine, and path of the task's folder."""


class EngineError(Exception):
    """The engine refuses a request, or does not answer. The message says which request and why."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status` is the status of the engine's HTTP answer; None: there was none."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Container:
    """A container to be made. It has no privileges, and only those files and devices of the machine that are named."""

    name: str
    image: str
    argv: tuple[str, ...]
    """Replaces the entry point and the command of the image; empty: those of the image."""
    env: Mapping[str, str]
    """Added to the environment of the image."""
    cwd: str
    user: str
    """`UID:GID`."""
    mounts: Mapping[str, tuple[str, bool]]
    """Path in the container to a path of the machine, and whether it may be written."""
    tmpfs: Mapping[str, str]
    """Path in the container to mount options of an empty file system in memory."""
    labels: Mapping[str, str]
    groups: tuple[str, ...] = ()
    """Supplementary groups, as numbers."""
    memory_bytes: int = 0
    """0: no limit."""
    processes: int = 0
    """Most processes and threads; 0: no limit."""
    cpu_shares: int = 0
    """Weight when CPUs are contended; 0: the engine's default."""
    shm_bytes: int = 0
    """Size of `/dev/shm`; 0: the engine's default."""
    shares_with: str | None = None
    """Name of a container whose IPC namespace and `/dev/shm` it uses, if that one runs."""
    gpus: tuple[str, ...] = ()
    """UUIDs or numbers of NVIDIA GPUs that it may use. Needs NVIDIA's container toolkit on the machine."""
    cgroup_parent: str | None = None
    """Cgroup below which the engine makes the container's, relative to the root of each hierarchy; None: its own."""

    def to_json(self) -> dict[str, Any]:
        """Returns the container as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Container":
        """Returns the container of `to_json`."""
        return cls(**{**body, "mounts": {place: tuple(pair) for place, pair in body["mounts"].items()}})


@dataclass(frozen=True)
class ContainerState:
    """The state of a container."""

    running: bool
    pid: int
    """Pid of its first process on the machine; 0: it has none."""
    exit_code: int
    out_of_memory: bool
    error: str
    """Why the engine could not start it; empty: it could."""


@dataclass(frozen=True)
class Image:
    """The facts about an image on the machine that mizzen uses."""

    id: str
    env: Mapping[str, str]
    volumes: tuple[str, ...]
    """Paths for which the engine would make volumes, which have no limit."""
    has_command: bool
    size_bytes: int


class ContainerEngine(Protocol):
    """A container engine of this machine. All methods block, and raise `EngineError`."""

    def describe(self) -> "EngineFacts":
        """Returns the properties of the engine."""

    def image(self, name: str) -> Image | None:
        """Returns an image on this machine; None: it does not exist here."""

    def pull(self, name: str, login: tuple[str, str] | None, progress: Callable[[str], None]) -> None:
        """Fetches an image from its registry. `login`: user and password. `progress` gets short texts for people."""

    def remove_image(self, name: str) -> None:
        """Removes an image. Does nothing if it does not exist. Status 409: a container uses it."""

    def create(self, container: Container) -> str:
        """Makes a container and returns its id."""

    def output(self, name: str) -> Iterator[tuple[bool, bytes]]:
        """Yields pieces of the output of a container that is running, or is created and will be started, each with
        whether it is of stderr. Attaches at once.
        """

    def start(self, name: str) -> None:
        """Starts a container."""

    def wait(self, name: str) -> None:
        """Waits until a container does not run any more."""

    def state(self, name: str) -> ContainerState | None:
        """Returns the state of a container; None: it does not exist."""

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to the first process of a container. Does nothing if it does not run."""

    def remove(self, name: str) -> None:
        """Kills and removes a container, with its volumes. Does nothing if it does not exist."""

    def containers(self, labels: Mapping[str, str]) -> Sequence[Mapping[str, str]]:
        """Returns the labels of the containers that have all of `labels`, each with its name as `name`."""


@dataclass(frozen=True)
class EngineFacts:
    """The properties of an engine."""

    name: str
    """Kind and version, such as `docker 20.10.24`."""
    has_cgroup_parents: bool
    """Whether `Container.cgroup_parent` can be used."""
    why_unusable: str | None
    """Why its containers cannot be used for tasks; None: they can."""


def open_engine(socket_path: str) -> ContainerEngine:
    """Returns the engine that listens on a Unix socket. Does not connect."""
    from agent.containers.docker import DockerEngine

    return DockerEngine(socket_path)


def container_name(run_id: str) -> str:
    """Returns the name of a task's container."""
    return f"mizzen-{run_id}"
