"""The parts of SkyPilot's service files that mizzen's own documents do not have.

Each field of SkyPilot that mizzen does not support is in one of two tables: it is refused by name, or it has no effect
and is accepted with a note. All other fields of SkyPilot's schema are read. `docs/services.md` shows the same tables.
"""

import re
from collections.abc import Callable, Collection, Mapping
from shlex import quote

from api.documents.at import At
from api.documents.jobs import MAX_COMMAND_BYTES
from api.documents.loading import Keys, Value
from api.problems import FieldError
from domain.ids import is_name

REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {
        "file_mounts": "use workdir or files, or download the data in setup",
        "volumes": "use workdir or files, or download the data in setup",
        "volume_mounts": "use workdir or files, or download the data in setup",
        "managed_secrets": "write secrets: {VARIABLE: name of the tenant's secret}",
        "config": "settings of clouds are in the installation's settings of its providers",
        "experimental": "settings of clouds are in the installation's settings of its providers",
        "event_callback": "follow `mizzen events`",
        "pool": "a pool of workers for batch jobs is not a service; submit workloads with `mizzen submit`",
        "jobs": "this is a workload document; use `mizzen submit`, or give run and service for a service",
        "level": "the field is named priority",
    },
    "resources": {
        "instance_type": "give accelerators, cpus and memory; the provider's settings list the machine types",
        "image_id": "the provider's settings name the image of the machines; install software in setup",
        "accelerator_args": "TPUs are not supported; omit it",
        "volumes": "use workdir or files, or download the data in setup",
        "ephemeral_storage": "the provider's machine types determine the disk; omit it",
        "local_disk": "the provider's machine types determine the disk; omit it",
        "max_hourly_cost": "limit replica_policy.max_replicas, or the tenant's quota",
        "labels": "labels belong to the top level of the document",
        "priority": "priority belongs to the top level of the document, where 1 is the highest",
        "priority_class": "use priority at the top level of the document, where 1 is the highest",
        "job_recovery": "a lost replica is always replaced; replica_policy.spot_placer chooses the zone",
        "autostop": "a service runs until `mizzen serve down`; min_replicas: 0 ends all replicas of an idle service",
        "hooks": "a task gets SIGTERM before it is stopped; handle it in run",
    },
    "service": {
        "tls": "give the certificate to the balancer: `mizzen balance --cert`",
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
}
"""By section: each field that is accepted without effect, and why."""
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_PROLOGUE = """\
export SKYPILOT_NODE_RANK="$RANK" SKYPILOT_NUM_NODES="$WORLD_SIZE" SKYPILOT_NODE_IPS="$MASTER_ADDR"
export SKYPILOT_NUM_GPUS_PER_NODE="$(printf %s "${CUDA_VISIBLE_DEVICES:-}" | tr , '\\n' | grep -c . || true)"
export SKYPILOT_SERVE_REPLICA_ID="${MIZZEN_WORKLOAD_NAME##*-}" SKYPILOT_TASK_ID="$MIZZEN_WORKLOAD"
"""
"""Sets SkyPilot's variables from mizzen's."""


def section(at: At, name: str, known: Collection[str], notes: list[str]) -> dict[str, At]:
    """Returns the known members of a section; adds an error for each refused key, and a note for each ignored one."""
    refused, ignored = REFUSED.get(name, {}), IGNORED.get(name, {})
    members = at.section(known, (*refused, *ignored))
    for key in [key for key in members if key not in known]:
        place = members.pop(key)
        if key in refused:
            place.wrong(f"is not supported: {refused[key]}")
        else:
            notes.append(f"{place.path} has no effect: {ignored[key]}")
    return members


def either(members: Mapping[str, At], own: str, other: str) -> At | None:
    """Returns the member `own` or its synonym `other`, if one is given. Both together are an error."""
    if own in members and other in members:
        members[other].wrong(f"means the same as {own}; give one of them")
    return members.get(own, members.get(other))


def as_variables(at: At) -> At:
    """Returns the mapping with numbers and booleans as strings, as SkyPilot converts them. Null remains invalid."""
    return _changed(at, lambda _, value: str(value) if isinstance(value, bool | float) else value)


def as_secrets(at: At) -> At:
    """Returns the mapping with names of secrets only.

    A variable without a value gets the secret with its own name in lower case, with hyphens. A value that cannot be a
    secret's name is an error without the value, because it may be the secret itself.
    """
    named = _changed(at, lambda key, value: key.lower().replace("_", "-") if value is None else value)
    if not isinstance(named.value, dict):
        return named
    for key, value in list(named.value.items()):
        if not (isinstance(value, str) and is_name(value)):
            message = (
                "must be the name of one of the tenant's secrets; `mizzen tenants secrets` stores a value under a name"
            )
            at.problems.append(FieldError(at.child(key, None).path, message))
            del named.value[key]
    return named


def _changed(at: At, change: Callable[[str, Value], Value]) -> At:
    if not isinstance(at.value, dict):
        return at
    pairs = [(key, change(key, value)) for key, value in at.value.items()]
    return At(at.path, _like(at.value, pairs), at.problems)


def _like(value: Mapping[str, Value], pairs: list[tuple[str, Value]]) -> Keys:
    """Returns a mapping of the pairs that still has the duplicate keys of `value`, which are errors."""
    result = Keys(pairs)
    result.twice += value.twice if isinstance(value, Keys) else ()
    return result


def filled_in(value: Value, env: Mapping[str, str]) -> Value:
    """Returns the value with `$NAME` and `${NAME}` replaced in its strings, for the variables in `env`."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: env.get(match[1] or match[2], match[0]), value)
    if isinstance(value, list):
        return [filled_in(one, env) for one in value]
    if isinstance(value, dict):
        return _like(value, [(filled_in(key, env), filled_in(one, env)) for key, one in value.items()])
    return value


def references(value: Value) -> set[str]:
    """Returns the names of the variables to which strings of the value refer, as `filled_in` finds them."""
    if isinstance(value, str):
        return {match[1] or match[2] for match in _REFERENCE.finditer(value)}
    inner = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
    return {name for one in inner for name in references(one)}


def in_bash(at: At, script: str) -> str | None:
    """Returns a script that runs `script` as SkyPilot does: by bash without options, with SkyPilot's variables."""
    wrapped = f"{_PROLOGUE}exec bash -c {quote(script)}\n"
    size = len(wrapped.encode())
    if size > MAX_COMMAND_BYTES:
        at.wrong(f"must have at most {MAX_COMMAND_BYTES} bytes with its quotes escaped, it has {size}")
        return None
    return wrapped
