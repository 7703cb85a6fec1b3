"""Converts a specification back to a document: the API shows it; `mizzen submit --from` and `mizzen retry` submit it.

Parsing the document gives the same specification (`api.documents.workload`). Fields with default values are omitted.
"""

from typing import Any

from api.documents.retries import retries_of
from domain.array_elements import shown_indexes
from domain.notify_spec import NotifySpec
from domain.spec import ArraySpec, CheckpointSpec, DependencySpec, JobSpec, LimitsSpec, ResourceSpec, WorkloadSpec
from domain.topology import TopologyRule

_CHECKPOINT = {"interval_s": "interval", "grace_s": "grace", "keep": "keep", "max_failing_s": "max_failing",
               "max_failures": "max_failures"}  # fmt: skip
_LIMITS = {"max_runtime_s": "max_runtime", "max_silence_s": "max_silence", "max_pending_s": "max_pending"}


def document_of(spec: WorkloadSpec) -> dict[str, Any]:
    """Returns the document of a workload's specification, as a JSON object.

    For a replica of a service the document is valid, but submitting it creates a plain workload, not a replica.
    """
    regions = {"allow": spec.regions_allowed and list(spec.regions_allowed), "exclude": list(spec.regions_excluded)}
    fields: dict[str, Any] = {
        "version": spec.version,
        "name": spec.name,
        "tenant": spec.tenant,
        "labels": spec.labels,
        "priority": spec.level,
        "recurring": spec.recurring,
        "jobs": [_job(job) for job in spec.jobs],
        "array": spec.array and _array(spec.array),
        "tables": list(spec.tables),
        "files": spec.files,
        "workdir": spec.workdir,
        "outputs": spec.outputs,
        "checkpoint": _changed(spec.checkpoint, CheckpointSpec(), _CHECKPOINT),
        "limits": _changed(spec.limits, LimitsSpec(), _LIMITS) | retries_of(spec.limits),
        "regions": {name: value for name, value in regions.items() if value},
        "capacity": spec.capacity and [str(kind) for kind in spec.capacity],
        "after": [_dependency(one) for one in spec.after],
        "not_before": spec.delay_s if spec.not_before is None else spec.not_before.isoformat(),
        "if_never": None if spec.if_never == "end" else spec.if_never,
        "notify": [_receiver(one) for one in spec.notify],
        "keep": spec.keep_s,
        "isolation": spec.isolation and spec.isolation.value,
    }
    return _given(fields)


def _array(array: ArraySpec) -> dict[str, Any]:
    matrix = {name: list(values) for name, values in array.matrix.items()}
    fields = {"indexes": shown_indexes(array.ranges), "throttle": array.throttle, "matrix": matrix}
    runners = array.runners and (array.runners.model_dump(exclude_defaults=True) or True)
    return _given({**fields, "exclude": list(array.exclude), "list": list(array.entries), "runners": runners})


def _job(job: JobSpec) -> dict[str, Any]:
    return _given(
        {
            "name": job.name,
            "role": job.role,
            "tasks": job.tasks if job.most_tasks is None else {"min": job.tasks, "max": job.most_tasks},
            "span_clusters": job.span_clusters or None,
            "topology": job.topology and _topology(job.topology),
            "resources": _resources(job.resources),
            "setup": job.setup,
            "restart": None if job.restart == "gang" else job.restart,
            "output": None if job.output == "merged" else job.output,
            "image": job.image,
            "image_pull_secret": job.image_pull_secret,
            "run": job.script if job.script is not None else list(job.argv),
            "env": job.env,
            "secrets": job.secrets,
        }
    )


def _topology(rule: TopologyRule) -> dict[str, Any]:
    piece = {"tasks": rule.slice_tasks, "level": rule.slice_level.value} if rule.slice_tasks > 1 else None
    return _given({
        "required": rule.required and rule.required.value, "preferred": rule.preferred and rule.preferred.value,
        "slice": piece,
    })  # fmt: skip


def _dependency(one: DependencySpec) -> dict[str, Any]:
    return _given(one.model_dump(exclude={"id"}) | {"same_index": one.same_index or None})


def _receiver(one: NotifySpec) -> dict[str, Any]:
    fields = one.model_dump(mode="json", exclude_defaults=True)
    in_secret = fields.pop("webhook_secret", None)
    return fields if in_secret is None else {"webhook": {"secret": in_secret}, **fields}


def _resources(resources: ResourceSpec) -> dict[str, Any]:
    accelerators = [f"{gpu_type}:{resources.gpus}" for gpu_type in resources.gpu_types]
    found = {"cpus": resources.cpus_milli / 1000, "memory": resources.memory_bytes}
    return {"accelerators": accelerators, **found} if accelerators else found


def _changed(value: CheckpointSpec | LimitsSpec, default: CheckpointSpec | LimitsSpec, names: dict[str, str]) -> Any:
    return {name: getattr(value, f) for f, name in names.items() if getattr(value, f) != getattr(default, f)}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that have a value: not null, and neither an empty mapping nor an empty list."""
    return {name: value for name, value in fields.items() if value is not None and value not in ({}, [], ())}
