"""Machines and their agents: preparing, running and stopping a gang's tasks, and being there."""

from dataclasses import dataclass, field

from domain.reported import NoticeReport, TaskProgress

DETACHED = "Detached"
"""Type of the error with which an agent that stops ends an activity: it let go of what goes on without it."""


@dataclass
class TaskExit:
    """How a task ended. Exactly one of `exit_code` and `signal` is set, or neither where its status was lost."""

    job: str
    task: int
    exit_code: int | None = None
    signal: int | None = None
    log_tail: str = ""
    """Of agents of earlier versions only: what tasks print does not travel through Temporal's history."""
    memory_limit_bytes: int | None = None
    """Set where the kernel killed one of its processes because the task had reached its limit of memory."""
    memory_peak_bytes: int | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0

    @property
    def status(self) -> str:
        """`exit code 3`, `signal 9`, or `an unknown status`."""
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        return f"signal {self.signal}" if self.signal is not None else "an unknown status"


@dataclass
class PrepareNode:
    """Asks an agent to fetch the launch description, unpack files and reserve a port for each job it leads."""

    workload_id: str
    attempt: int
    machine: str
    launch_key: str
    bucket_url: str
    leads_jobs: list[str]
    launch_sha256: str | None = None
    """`LaunchPlan.launch_sha256`."""


@dataclass
class NodePrepared:
    """The agent's answer: an address that its peers can dial, and a port for each job that it leads."""

    machine: str
    address: str
    ports: dict[str, int]


@dataclass
class RunNode:
    """Asks an agent to run its tasks of an attempt to their end: the one long activity for each node."""

    workload_id: str
    attempt: int
    machine: str
    launch_key: str
    bucket_url: str
    masters: dict[str, str]
    """Job to `address:port` of its rendezvous."""
    launch_sha256: str | None = None
    """`LaunchPlan.launch_sha256`."""
    leads_jobs: list[str] | None = None
    """With nothing prepared before: the jobs for which a port is reserved here."""


@dataclass
class NodeHeartbeat:
    """Heartbeat details of `node.run`."""

    progress: list[TaskProgress]
    running: int


@dataclass
class NodeOutcome:
    """How a node's tasks ended. `stopped` if the agent was told to stop them before they had all ended by themselves.

    As soon as one task fails the agent stops the others of its node and returns; the workflow stops the other nodes.
    """

    machine: str
    exits: list[TaskExit]
    progress: list[TaskProgress]
    stopped: bool = False
    notice: NoticeReport | None = None
    """The platform's word that it takes this machine, heard by the agent or by a task, if there was one."""


@dataclass
class StopNode:
    """Asks an agent to stop its tasks of an attempt: SIGTERM, `grace_s`, SIGKILL to each with all that it started.

    Returns when nothing of them runs. Attempts up to `attempt` are refused from then on.
    """

    workload_id: str
    attempt: int
    grace_s: float


@dataclass
class Hello:
    """An agent's registration: a signal to its machine's workflow, sent at each start and while no attendance runs."""

    machine: str
    region: str
    cluster: str
    rack: str
    gpu_type: str | None
    gpus: int
    cpus_milli: int
    memory_bytes: int
    address: str
    incarnation: str
    """New at each boot of the machine; an agent that restarts on a running machine keeps it."""
    public_key: str
    """X25519, base64: secrets of its tasks are sealed to it."""
    runs: list[str] = field(default_factory=list)
    """`workload.attempt` of what still runs there."""
    key_proof: str = ""
    """Answer to `Welcome.challenge`, where the machine holds the pinned key too."""
    instance: str = ""
    """Id of the instance that it is; empty: nobody launched it."""
    join_token: str = ""
    """What it was launched with, to show that it is this instance."""


@dataclass
class Welcome:
    """Answer to `Hello`: runs that no longer belong there, which the agent stops before the machine is ready."""

    stop: list[str]
    heartbeat_timeout_s: float
    lost_after_s: float = 30.0
    refused: bool = False
    """The machine is known with another key: nothing was registered."""
    challenge: str | None = None
    """Where refused: base64 of a sealed box for the pinned key, to be opened by the agent (`Activity.PROVE_KEY`)."""


@dataclass
class ProveKey:
    """Asks an agent to show that it holds the key that its machine is known with, beside the one that it has now."""

    machine: str
    challenge: str


@dataclass
class MachineNotice:
    """An agent's word that a platform takes its machine: signalled to its machine's workflow, again and again."""

    machine: str
    incarnation: str
    notice: NoticeReport
    run: str | None = None
    """`workload.attempt` of a task whose word it is, and which it is about; None: the agent's, about the machine."""


@dataclass
class Attend:
    """Asks an agent to stop `stop`, then to heartbeat for as long as it lives: how an idle machine is known alive."""

    machine: str
    incarnation: str
    stop: list[str]
