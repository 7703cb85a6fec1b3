"""Reads and validates a whole service document, in mizzen's own form or in that of SkyPilot's service files.

A document with `version` is in mizzen's form: its scripts run as those of workloads. A document without it is in
SkyPilot's form: its scripts run as SkyPilot runs them (`skypilot.in_bash`). All fields are the same in both forms.
`checking.check_service` then checks the document against the installation.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from api.documents.at import At
from api.documents.jobs import read_env, read_run, read_script, read_secrets
from api.documents.loading import Value
from api.documents.replicas import SCRIPTS, Replicas, read_replicas
from api.documents.serving import read_serving
from api.documents.skypilot import as_secrets, as_variables, either, in_bash, section
from api.documents.workload import VERSION, read_files, read_labels, read_workdir
from api.problems import FieldError
from domain.ids import NAME_LENGTH, is_name
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL
from domain.service import ResourceOption, ServiceSpec

MAX_MACHINES = 1000
UP = "mizzen serve up"
KEYS = (
    "version", "name", "tenant", "labels", "priority", "service", "resources", "machines", "num_nodes", "setup", "run",
    "env", "envs", "secrets", "files", "workdir",
)  # fmt: skip


@dataclass(frozen=True)
class ServiceDraft:
    """The valid fields of a service document, its errors, and the positions of values that must be checked further."""

    problems: list[FieldError]
    tenant: str | None
    tenant_at: At
    priority_at: At | None = None
    secrets_at: list[tuple[At, str]] = field(default_factory=list)
    workdir_at: At | None = None
    workdir: str | None = None
    options: list[ResourceOption] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Sentences about fields that are valid but have no effect or another one than in SkyPilot, for the user."""

    def spell(self, gpu_types: Collection[str]) -> None:
        """Changes the GPU types to the spelling in `gpu_types`; documents may write them in any case."""
        known = {name.casefold(): name for name in gpu_types}
        for at, option in enumerate(self.options):
            types = tuple(known.get(name.casefold(), name) for name in option.resources.gpu_types)
            resources = option.resources.model_copy(update={"gpu_types": types})
            self.options[at] = option.model_copy(update={"resources": resources})

    def spec(self) -> ServiceSpec:
        """Returns the specification. Call it only if the document has no errors."""
        return ServiceSpec(options=tuple(self.options), **self.fields)


def read_service(value: Value, default_tenant: str | None, default_name: str | None = None) -> ServiceDraft:
    """Reads the document `value`.

    Args:
        value: the parsed document.
        default_tenant: the tenant of the caller's key, which is used if the document names no tenant.
        default_name: the name of the service if the document has none; SkyPilot's files often have none.
    """
    at = At("", value, [])
    notes: list[str] = []
    if not isinstance(value, dict):
        at.wrong("the document must be a mapping with the keys " + ", ".join(KEYS) if value is not None
                 else "the document is empty")  # fmt: skip
        return ServiceDraft(at.problems, default_tenant, at)
    members = section(at, "", KEYS, notes)
    if "version" in members and (members["version"].value != VERSION or members["version"].value is True):
        members["version"].wrong(f"must be {VERSION}, the only supported version, or absent in a file of SkyPilot")
    tenant_at = members.get("tenant", at.child("tenant", None))
    tenant = tenant_at.name() if "tenant" in members else default_tenant
    if tenant is None and "tenant" not in members:
        at.missing("tenant", "only a key with a tenant can omit it")
    replicas = read_replicas(members["resources"], notes) if "resources" in members else Replicas()
    machines = either(members, "machines", "num_nodes")
    env, secrets = _read_variables(members)
    fields = {
        "name": _read_name(members, at, default_name, notes) or "",
        "tenant": tenant or "",
        "labels": read_labels(members["labels"]) if "labels" in members else {},
        "level": members["priority"].integer(HIGHEST_LEVEL, LOWEST_LEVEL) if "priority" in members else None,
        "machines": (machines.integer(1, MAX_MACHINES) if machines is not None else None) or 1,
        "env": env,
        "secrets": {variable: secret for variable, (_, secret) in secrets.items()},
        "files": read_files(members["files"]) if "files" in members else {},
        "workdir": _read_workdir(members["workdir"]) if "workdir" in members else None,
        **_read_commands(members, replicas, at),
    }
    options = replicas.options
    if "service" not in members:
        at.missing("service", "the section with the readiness probe and the number of replicas")
    else:
        serving = read_serving(members["service"], replicas, env, secrets, notes)
        options = [option.model_copy(update={"spot": serving.spot}) for option in options]
        fields |= serving.fields
    return ServiceDraft(
        problems=at.problems,
        tenant=tenant,
        tenant_at=tenant_at,
        priority_at=members.get("priority"),
        secrets_at=list(secrets.values()),
        workdir_at=members.get("workdir"),
        workdir=fields["workdir"],
        options=options,
        fields=fields,
        notes=notes,
    )


def _read_name(members: Mapping[str, At], at: At, default: str | None, notes: list[str]) -> str | None:
    """Returns the name. SkyPilot's names may have capitals, dots and underscores, which are replaced."""
    if "name" not in members:
        if default is None:
            at.missing("name", "the service needs a name")
        return default
    text = members["name"].text("a name")
    if text is not None and not is_name(text) and "version" not in members:
        changed = re.sub(r"[._]", "-", text).lower()[:NAME_LENGTH].rstrip("-")
        if is_name(changed):
            notes.append(f"name: the service is named {changed}, because names have no capitals, dots and underscores")
            return changed
    return None if text is None else members["name"].name()


def _read_variables(members: Mapping[str, At]) -> tuple[dict[str, str], dict[str, tuple[At, str]]]:
    place = either(members, "env", "envs")
    env = {}
    if place is not None:
        env = read_env(as_variables(place) if "envs" in members else place)
    secrets = read_secrets(as_secrets(members["secrets"]), env) if "secrets" in members else {}
    return env, secrets


def _read_commands(members: Mapping[str, At], replicas: Replicas, at: At) -> dict[str, Any]:
    """Returns `argv`, `script` and `setup`."""
    places = {key: members[key] for key in SCRIPTS if key in members}
    for key, place in replicas.scripts.items():
        if key in places:
            place.wrong(f"is also given at the top level; give {key} only there")
        places.setdefault(key, place)
    if "run" not in places:
        at.missing("run", "the command that starts the server")
    argv, script = read_run(places["run"]) if "run" in places else ((), None)
    setup = read_script(places["setup"]) if "setup" in places else None
    if "version" not in members:
        script = None if script is None else in_bash(places["run"], script)
        setup = None if setup is None else in_bash(places["setup"], setup)
    return {"argv": argv, "script": script, "setup": setup}


def _read_workdir(at: At) -> str | None:
    if isinstance(at.value, dict) and "url" in at.value:
        at.wrong(f"git repositories are not supported: clone it in setup, or give a folder that `{UP}` uploads")
        return None
    return read_workdir(at, UP)
