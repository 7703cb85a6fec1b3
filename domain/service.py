"""The validated specification of a service: its replicas, how many there are, and how requests reach them.

`api.documents.service` reads the user's document (YAML or JSON) and normalises it into this form. Names end in their
unit.
"""

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from domain.notify_spec import NotifySpec
from domain.serving_spec import ServingSpec
from domain.spec import ResourceSpec, TaskSpec
from domain.spread import SpreadLevel


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LoadBalancing(StrEnum):
    """How the balancer chooses the replica of a request."""

    ROUND_ROBIN = "round_robin"
    LEAST_CONNECTIONS = "least_connections"
    LEAST_LOAD = "least_load"
    """The nearest zone until it is overloaded, then the replica with the least load."""


STICKY_PREFIXES_BYTES = (256, 1024, 4096)
"""How much of a request's body can be its key (`StickySpec.prefix_bytes`)."""


class UpdateMode(StrEnum):
    """How replicas of an older version are replaced."""

    ROLLING = "rolling"
    """A few at a time. A replica of the new version becomes ready before its predecessor is drained."""
    BLUE_GREEN = "blue_green"
    """All replicas of the new version become ready before one of the old version is drained."""


class ResourceOption(_Frozen):
    """One acceptable set of resources of a replica's machine, and where the machine may be."""

    resources: ResourceSpec = ResourceSpec()
    spot: bool = False
    """Whether spot machines are acceptable."""
    provider: str | None = None
    """The provider's name in the installation's settings; None: any. The same holds for the next two fields."""
    region: str | None = None
    zone: str | None = None


class CanarySpec(_Frozen):
    """How a new version is judged, by the answers of a few replicas, before it replaces the version that works."""

    share: float
    """Its share of the requests, and of the number of replicas, which is rounded up."""
    for_s: float = 600.0
    """How long the new version gets requests before it is judged."""
    error_rate: float | None = None
    """The largest share of failed answers; None: no limit."""
    p90_s: float | None = None
    """The longest 90th percentile of the total time of the answers; None: no limit."""


class StickySpec(_Frozen):
    """The key of requests: requests with the same key go to the same replica. Exactly one of the fields is set."""

    header: str | None = None
    """The name of the header whose value is the key."""
    prefix_bytes: int | None = None
    """The number of bytes of the body that are the key."""


class ReplicaPolicySpec(_Frozen):
    """How many replicas a service has, and which of them run on spot machines (SkyServe, sections 3 and 4)."""

    min_replicas: int = 1
    max_replicas: int = 1
    """The number of replicas is fixed if this equals `min_replicas`."""
    target_qps_per_replica: float | None = None
    """Q_tar, the requests per second that one replica should get; None: it is not a criterion. Without this and the
    targets of requests in progress and of the load, the number of replicas is fixed."""
    target_qps_by_gpu: dict[str, float] = Field(default_factory=dict)
    """Q_tar of replicas by their GPUs, such as `a100:1`, or `a100` for any number of them, in lower case. The largest
    value is `target_qps_per_replica`."""
    target_ongoing_requests: float | None = None
    """The requests in progress that one replica should have; None: it is not a criterion."""
    target_load_per_replica: float | None = None
    """The load that one replica should have, in the unit in which replicas report it; None: it is not a criterion."""
    upscale_delay_s: float = 300.0
    downscale_delay_s: float = 1200.0
    placer: str | None = None
    """The policy that places spot replicas, a name in `services.spot.policies`; None: the service uses no spot
    machines."""
    num_overprovision: int = 0
    """N_extra, the number of spot replicas beyond the target."""
    outage_price_s: float | None = None
    """What an outage may cost for `spothedge+`, in seconds of the target on demand; None: the policy's default."""
    dynamic_ondemand_fallback: bool = False
    """Whether on-demand replicas stand in for spot replicas that are not ready."""
    base_ondemand_fallback_replicas: int = 0
    """The number of on-demand replicas that are always kept."""

    def qps_of(self, gpu_type: str | None, gpus: int) -> float | None:
        """Returns the target requests per second of a replica with these GPUs (Q_tar); None: not set for these GPUs."""
        kind = (gpu_type or "").casefold()
        return self.target_qps_by_gpu.get(f"{kind}:{gpus}", self.target_qps_by_gpu.get(kind))


class ReplicaSpread(_Frozen):
    """How far apart the replicas of a service are placed (`domain.spread.SpreadRule`)."""

    over: SpreadLevel | None = SpreadLevel.MACHINE
    """None: replicas are packed like other workloads."""
    required: bool = False
    """Whether a replica waits rather than share a place of the level `over` with another one."""


class ServiceSpec(TaskSpec):
    """A service: replicas behind one endpoint. Each replica is a workload of one gang, whose tasks run the command."""

    name: str
    tenant: str
    labels: dict[str, str] = Field(default_factory=dict)
    level: int | None = None
    """A priority level below the tenant's; None: the tenant's level."""
    machines: int = 1
    """Number of machines of one replica, all in one zone. The replica ends if it loses one of them."""
    options: tuple[ResourceOption, ...] = (ResourceOption(),)
    """Acceptable resources, in order of preference."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Environment variable to the name of one of the tenant's secrets."""
    image_pull_secret: str | None = None
    """Name of the tenant's secret with `USER:PASSWORD` for the registry of the image."""
    files: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    """SHA-256 (hex) of an uploaded archive."""
    serving: ServingSpec = ServingSpec()
    policy: ReplicaPolicySpec = ReplicaPolicySpec()
    balancing: LoadBalancing = LoadBalancing.LEAST_CONNECTIONS
    sticky: StickySpec | None = None
    """The key of requests; None: each request is balanced independently."""
    resume: bool = False
    """Whether the replicas continue a broken stream that another one has begun, for a request with `Last-Event-ID`."""
    retry_non_idempotent: bool = False
    """Whether the balancer may send a request of any method again if its replica died before an answer began, or
    answered with 500, 502 or 503."""
    request_timeout_s: float = 600.0
    """The longest time without a byte from the replica, while a request is in progress."""
    first_byte_s: float | None = None
    """The longest time from a request to the first byte of the answer; a replica that exceeds it gets no requests.
    None: relative to the other replicas."""
    max_queue: int = 1000
    """Maximum number of requests that wait in the balancer; further ones get the status 503."""
    hold_s: float = 300.0
    """Maximum time for which a request waits in the balancer while no replica is ready; then it gets the status 503.
    0: it gets this status at once."""
    max_surge: int = 1
    """Maximum number of replicas that a rolling update adds at a time."""
    max_unavailable: int = 0
    """How many replicas below the target may be ready during a rolling update. With 1 or more, it can replace replicas
    without free slots."""
    certificate: str | None = None
    """Name of the tenant's secret with the PEM text of the certificate and its private key that balancers use; None:
    they use TLS only by an option of their own."""
    canary: CanarySpec | None = None
    """How the version is judged before it replaces an older one; None: its readiness suffices."""
    spread: ReplicaSpread = ReplicaSpread()
    notify: tuple[NotifySpec, ...] = ()
    """Who is notified when the service has ended."""

    @property
    def uses_spot(self) -> bool:
        """Whether replicas may run on spot machines."""
        return self.policy.placer is not None

    def has_replicas_of(self, other: "ServiceSpec") -> bool:
        """Returns whether replicas of `other` also satisfy this specification, so that an update keeps them."""
        mine, theirs = (one.model_dump(exclude=NOT_IN_REPLICAS) for one in (self, other))
        return mine == theirs


NOT_IN_REPLICAS: Any = {
    "policy": True,
    "balancing": True,
    "sticky": True,
    "resume": True,
    "retry_non_idempotent": True,
    "request_timeout_s": True,
    "first_byte_s": True,
    "max_queue": True,
    "hold_s": True,
    "certificate": True,
    "max_surge": True,
    "max_unavailable": True,
    "canary": True,
    "spread": True,
    "notify": True,
    "serving": {"drain_s": True, "probe": {"initial_delay_s": True}},
}
"""The fields that running replicas do not depend on: an update that changes only these replaces no replica."""
