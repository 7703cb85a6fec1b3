"""The workload of a replica: a gang of one job, of one attempt, that serves requests."""

from domain.capacity import CapacityKind
from domain.ids import NAME_LENGTH
from domain.service import ResourceOption, ServiceSpec
from domain.spec import CheckpointSpec, JobSpec, WorkloadSpec

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
    gpu_type: str | None,
) -> WorkloadSpec:
    """Returns the specification of a replica's workload.

    Args:
        spec: the service.
        number: the replica's number.
        level: the priority level; None: the tenant's.
        cluster: the cluster of the replica's own machines; None: it runs on shared machines.
        option: the resources.
        gpu_type: the GPU type of the replica's own machines; None: any of the option's types.
    """
    resources = option.resources
    if gpu_type is not None and resources.gpus:
        resources = resources.model_copy(update={"gpu_types": (gpu_type,)})
    job = JobSpec(
        name=JOB,
        role=JOB,
        tasks=spec.machines,
        resources=resources,
        argv=spec.argv,
        script=spec.script,
        setup=spec.setup,
        env=spec.env,
        secrets=spec.secrets,
    )
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
        capacity=None if cluster is not None else SHARED,
        regions_allowed=None if option.region is None else (option.region,),
    )
