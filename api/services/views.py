"""Response models of services."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from api.paging import Page
from api.views import NotificationView, ReasonView, View
from domain.service import LoadBalancing, UpdateMode


class NoteView(View):
    """A note on a service: why it has fewer replicas than its target, or which update was abandoned."""

    code: str = Field(examples=["update_given_up"])
    sentence: str


class ServiceReplicaView(View):
    """A replica of a service."""

    number: int
    version: int
    workload: str = Field(description="Id of the replica's workload; `mizzen why` explains its state")
    stage: Literal["starting", "ready", "unready", "leaving", "draining", "ending", "ended"]
    kind: str = Field(description="`spot` or `on_demand`; a replica on shared machines is `on_demand`")
    zone: str | None = Field(description="`region/zone` of its machine; null: it runs on shared machines")
    address: str | None
    port: int | None
    usd_per_h: float | None = Field(description="Price of its machines; null: it runs on shared machines")
    is_base: bool = Field(description="Whether it runs at the service's priority; extra replicas run at a lower one")
    replaces: int | None = Field(description="The replica of an older version that it replaces")
    launched_at: datetime
    ready_at: datetime | None = Field(description="When it first became ready")
    ended_at: datetime | None
    cause: str | None = Field(description="Why it ends or has ended")
    probe_error: str | None = Field(description="The result of its last probe, if it failed")
    load: float | None = Field(description="The load that it reports for the autoscaler; null: none")
    ejected: str | None = Field(description="Why balancers send it no requests, or few, although its probe succeeds")
    phase: str | None = Field(description="Phase of its workload; null: the workload's record is deleted")
    reason: ReasonView | None = Field(description="The reason of that phase")


class RequestsView(View):
    """The requests of the last minute, as the service's balancers counted them."""

    per_s: float
    failed: int = Field(description="Requests that got an error of the balancer or no answer")
    cut: int = Field(description="Answers that ended early")
    p50_s: float | None = Field(description="Median time to the last byte, averaged over the minute by requests")
    p99_s: float | None = Field(description="99th percentile of that time, averaged in the same way")


class ServiceView(View):
    """A service."""

    id: str
    tenant: str
    name: str
    version: int
    state: Literal["starting", "ready", "degraded", "scaled_to_zero", "stopping", "ended"] = Field(
        description="`ready`: at least `target` replicas are ready; `degraded`: at least one is; `scaled_to_zero`:"
        " there is none, and the first request starts one"
    )
    target: int = Field(description="Number of replicas that should be ready now")
    ready: dict[str, int] = Field(
        description="Ready replicas by capacity kind and zone", examples=[{"spot us-east-1/us-east-1a": 2}]
    )
    live: int = Field(description="Number of replicas that were launched and have not ended")
    versions: dict[str, int] = Field(description="Ready replicas by version")
    availability: float | None = Field(
        description="Fraction of the time with a target above 0 in which at least `target` replicas were ready"
    )
    usd: float = Field(description="Cost of its own machines so far, in US dollars")
    usd_on_demand: float | None = Field(
        description="Cost that `target` on-demand replicas would have had; null: no provider offers them"
    )
    preemptions: int
    requests: RequestsView | None = Field(description="null: no balancer reports")
    notes: list[NoteView]
    created_at: datetime
    stopping_at: datetime | None
    ended_at: datetime | None


class ServiceDetail(ServiceView):
    """A service with its replicas and its specification."""

    policy: str = Field(description="The policy that places replicas", examples=["spothedge"])
    update_mode: UpdateMode
    zones: list[str] = Field(description="The spot zones that the policy knows")
    replicas: list[ServiceReplicaView] = Field(description="The replicas that have not ended, by number")
    spec: dict[str, Any] = Field(description="The newest version's specification")
    notifications: list[NotificationView] = Field(description="Notifications of its end, by receiver")


class ServiceChanged(ServiceDetail):
    """A service that was created or updated."""

    document_notes: list[str] = Field(description="Fields of the document with no effect, or a different one")


class ServicePage(Page[ServiceView]):
    """A page of services, sorted by tenant and name."""


class ServiceReplicaPage(Page[ServiceReplicaView]):
    """A page of a service's replicas, newest first."""


class EndpointView(View):
    """A replica to which a balancer sends requests."""

    replica: int
    version: int
    address: str
    port: int
    region: str
    zone: str | None
    gpu_type: str | None = Field(description="GPU type of its machine; null: it has no GPUs")
    kind: str
    state: Literal["ready", "draining"] = Field(description="`draining`: it gets no new requests")
    ejected: bool = Field(description="Whether balancers send it no or few requests, because its answers fail")
    is_canary: bool = Field(description="Whether it is a canary, which gets only a share of the requests")


class CanaryView(View):
    """A version that is judged by the answers of its replicas."""

    version: int
    share: float = Field(description="Share of the requests that its replicas get together")
    slow_s: float | None = Field(description="Answers that take longer are counted as slow; null: none are")


class EndpointList(View):
    """The endpoints of a service, and how to balance requests between them."""

    service: str
    name: str
    version: int
    policy: LoadBalancing
    sticky_header: str | None = Field(description="Requests with the same value of this header go to the same replica")
    sticky_prefix_bytes: int | None = Field(
        description="Requests whose bodies begin with the same bytes go to the same replica"
    )
    resume: bool = Field(description="Whether replicas continue broken streams, for requests with Last-Event-ID")
    retry_non_idempotent: bool
    request_timeout_s: float
    first_byte_s: float | None = Field(
        description="Longest time to the first byte of an answer; null: relative to the other replicas"
    )
    max_queue: int
    hold_s: float = Field(description="Longest time for which a request waits while no replica is ready")
    drain_s: float
    probe_path: str
    probe_is_get: bool = Field(description="Whether a GET of `probe_path` says that the replica is ready")
    certificate: str | None = Field(
        description="Name of the certificate for clients, another one for another certificate; null: the service has"
        " none"
    )
    canary: CanaryView | None = Field(description="null: no version is judged")
    endpoints: list[EndpointView]


class CertificateView(View):
    """The certificate of a service for its clients."""

    name: str
    pem: str = Field(description="Certificate, chain and private key")
