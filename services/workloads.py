"""The workload of a replica: a gang of one job, of one attempt, that serves requests."""

from capacity.offers import Shape
from domain.capacity import CapacityKind
from domain.ids import NAME_LENGTH
from domain.isolation import Isolation
from domain.service import ResourceOption, ServiceSpec
from domain.spec import CheckpointSpec, JobSpec, WorkloadSpec
from domain.spread import SpreadRule

JOB = "server"
"""Name of the job of a replica's workload."""
SHARED = (CapacityKind.RESERVED, CapacityKind.ON_DEMAND)
"""The kinds of the shared machines on which a replica may run that does not get machines of its own."""
_GRACE_S = 30.0
"""Time from the notice (SIGTERM) to SIGKILL. Requests in progress have ended before: the replica was drained."""


def replica_name(service: str, number: int) -> str:
    """Returns the name of the workload of a service's replica."""
    suffix = f"-{number}"
    return service[: NAME_LENGTH - len(suffix)].rstrip("-") + suffix


def replica_workload(
    spec: ServiceSpec,
    number: int,
    *,
    level: int | None,
    cluster: str | None,
    option: ResourceOption,
    shape: Shape | None,
    spread: SpreadRule | None,
) -> WorkloadSpec:
    """Returns the specification of a replica's workload.

    Args:
        spec: the service.
        number: the replica's number.
        level: the priority level; None: the tenant's.
        cluster: the cluster of the replica's own machines; None: it runs on shared machines.
        option: the resources.
        shape: the shape of the replica's own machines, of which it gets all cores and all memory; None: it runs on
            shared machines, with the option's resources.
        spread: how far it should be from the other replicas.
    """
    resources = option.resources
    if shape is not None:
        own = {"cpus_milli": shape.cpus_milli, "memory_bytes": shape.memory_bytes}
        types = {"gpu_types": (shape.gpu_type,)} if resources.gpus and shape.gpu_type is not None else {}
        resources = resources.model_copy(update=own | types)
    job = JobSpec(
        name=JOB,
        role=JOB,
        tasks=spec.machines,
        resources=resources,
        secrets=spec.secrets,
        image_pull_secret=spec.image_pull_secret,
        **spec.task_fields(),
    )
    needs_sandbox = spec.image is None and any(one.is_absolute for one in spec.mounts)
    return WorkloadSpec(
        name=replica_name(spec.name, number),
        tenant=spec.tenant,
        labels=spec.labels,
        level=level,
        jobs=(job,),
        files=spec.files,
        workdir=spec.workdir,
        checkpoint=CheckpointSpec(grace_s=_GRACE_S),
        serving=spec.serving,
        one_attempt=True,
        cluster=cluster,
        spread=spread,
        capacity=None if cluster is not None else SHARED,
        isolation=Isolation.SANDBOX if needs_sandbox else None,
        regions_allowed=None if option.region is None else (option.region,),
    )
