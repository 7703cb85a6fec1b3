"""The parts of SkyPilot's service files that mizzen's own documents do not have.

Each field of SkyPilot that mizzen does not support is in one of two tables: it is refused by name, or it has no effect
and is accepted with a note. All other fields of SkyPilot's schema are read. `docs/services.md` shows the same tables.
"""

from collections.abc import Mapping
from shlex import quote
from typing import Any

from api.documents import forms
from api.documents.forms import Field, Form
from api.documents.position import At
from api.documents.workload import MAX_COMMAND_BYTES

_CLOUDS = ("allowed_clouds", "aws", "azure", "gcp", "kubernetes", "lambda", "nebius", "oci", "runpod", "ssh", "vast",
           "vsphere")  # fmt: skip
REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {
        "volumes": "use file_mounts or workdir, or download the data in setup",
        "volume_mounts": "use file_mounts or workdir, or download the data in setup",
        "managed_secrets": "write secrets: {VARIABLE: name of the tenant's secret}",
        "experimental": "settings of clouds are in the installation's settings of its providers",
        "event_callback": "follow `mizzen events`",
        "pool": "a pool of workers for batch jobs is not a service; submit workloads with `mizzen submit`",
        "jobs": "this is a workload document; use `mizzen submit`, or give run and service for a service",
        "level": "the field is named priority",
    },
    "resources": {
        "instance_type": "give accelerators, cpus and memory; the provider's settings list the machine types",
        "accelerator_args": "TPUs are not supported; omit it",
        "volumes": "use file_mounts or workdir, or download the data in setup",
        "ephemeral_storage": "the provider's machine types determine the disk; omit it",
        "local_disk": "the provider's machine types determine the disk; omit it",
        "max_hourly_cost": "limit replica_policy.max_replicas, or the tenant's quota",
        "priority": "priority belongs to the top level of the document, where 1 is the highest",
        "priority_class": "use priority at the top level of the document, where 1 is the highest",
        "job_recovery": "a lost replica is always replaced; replica_policy.spot_placer chooses the zone",
        "autostop": "a service runs until `mizzen serve down`; min_replicas: 0 ends all replicas of an idle service",
        "hooks": "a task gets SIGTERM before it is stopped; handle it in run",
    },
    "config": {
        "docker": "operators set the options of the machines' container engines",
        "admin_policy": "operators set quotas and priorities of tenants",
    },
    "service": {
        "pool": "a pool of workers for batch jobs is not a service; submit workloads with `mizzen submit`",
        "workers": "the field is named replicas",
    },
    "service.replica_policy": {
        "queue_length_threshold": "only SkyPilot's pools have it; use target_qps_per_replica",
    },
    "service.readiness_probe": {
        "consecutive_failure_threshold_timeout": "the time until a failing replica is ended is fixed; "
        "failures is the number of failed probes after which a replica gets no requests",
    },
}  # fmt: skip
"""By section: each unsupported field, and what to do instead."""
IGNORED: Mapping[str, Mapping[str, str]] = {
    "": {
        "api_server_access": "replicas have no access to the API",
        "inputs": "it is a hint about costs",
        "outputs": "it is a hint about costs",
    },
    "resources": {
        "disk_size": "the provider's machine types determine the disk",
        "disk_tier": "the provider's machine types determine the disk",
        "network_tier": "the provider's machine types determine the network",
    },
    "config": dict.fromkeys(_CLOUDS, "the settings of the installation's providers apply"),
}
"""By section: each field that is accepted without effect, and why."""
_PROLOGUE = """\
export SKYPILOT_NODE_RANK="$RANK" SKYPILOT_NUM_NODES="$WORLD_SIZE"
export SKYPILOT_NODE_IPS="${MIZZEN_TASK_ADDRS:-$MASTER_ADDR}"
export SKYPILOT_NUM_GPUS_PER_NODE="$(printf %s "${CUDA_VISIBLE_DEVICES:-}" | tr , '\\n' | grep -c . || true)"
export SKYPILOT_SERVE_REPLICA_ID="${MIZZEN_WORKLOAD_NAME##*-}" SKYPILOT_TASK_ID="$MIZZEN_WORKLOAD"
"""
"""Sets SkyPilot's variables from mizzen's."""
ESCAPED_SIZE = f"Without version, scripts have at most {MAX_COMMAND_BYTES} bytes with their quotes escaped"


def section(name: str, fields: Mapping[str, Field], description: str = "") -> Form:
    """Returns a section of a service document, with SkyPilot's other fields of the section that has this name."""
    return forms.section(fields, description, refused=REFUSED.get(name), ignored=IGNORED.get(name))


def either(at: At, values: dict[str, Any], own: str, other: str) -> Any:
    """Returns the value of the field `own` or its synonym `other`, and removes both. Both together are an error."""
    found, synonym = values.pop(own, None), values.pop(other, None)
    if at.get(own).value is not None and at.get(*(parts := other.split("."))).value is not None:
        at.get(*parts).wrong(f"means the same as {own}; give one of them", rule=not_both(own, other))
    return synonym if found is None else found


def not_both(own: str, other: str) -> str:
    """Returns the rule about a field and its synonym."""
    return f"{other} means the same as {own}; only one of them is given"


def in_bash(at: At, script: str) -> str | None:
    """Returns a script that runs `script` as SkyPilot does: by bash without options, with SkyPilot's variables."""
    wrapped = f"{_PROLOGUE}exec bash -c {quote(script)}\n"
    size = len(wrapped.encode())
    if size > MAX_COMMAND_BYTES:
        message = f"must have at most {MAX_COMMAND_BYTES} bytes with its quotes escaped, it has {size}"
        at.wrong(message, rule=ESCAPED_SIZE)
        return None
    return wrapped
