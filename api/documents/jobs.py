"""Reads and validates the jobs of a workload document."""

from dataclasses import dataclass
from typing import Any

from api.documents.at import At
from api.documents.values import accelerators, cpus_milli, size_bytes, variable
from domain.spec import JobSpec, ResourceSpec

MAX_JOBS = 32
MAX_TASKS = 100_000
MAX_ARGUMENTS = 1024
MAX_COMMAND_BYTES = 96 << 10
MAX_VARIABLES = 256
MAX_ENVIRONMENT_BYTES = 64 << 10
_MAX_VALUE_BYTES = 32 << 10
_JOB_KEYS = ("name", "role", "tasks", "span_clusters", "resources", "setup", "run", "env", "secrets")
_RESOURCE_KEYS = ("accelerators", "cpus", "memory")


@dataclass(frozen=True)
class JobDraft:
    """The valid fields of a job, with the positions of values that must be checked against the installation."""

    name: str | None
    tasks: int
    resources: ResourceSpec | None
    resources_at: At
    types_at: list[tuple[At, str]]
    secrets_at: list[tuple[At, str]]
    fields: dict[str, Any]

    def spec(self) -> JobSpec:
        """Returns the job's specification. Call it only if the document has no errors."""
        resources = self.resources or ResourceSpec()
        return JobSpec(name=self.name or "", tasks=self.tasks, resources=resources, **self.fields)


def read_jobs(at: At) -> list[JobDraft]:
    """Reads the list of jobs, and checks limits and unique names across jobs."""
    places = at.items("jobs", MAX_JOBS)
    if isinstance(at.value, list) and not at.value:
        at.wrong("must have at least one job")
    drafts = [_read_job(place) for place in places]
    seen: set[str] = set()
    for place, draft in zip(places, drafts, strict=True):
        if draft.name is not None and draft.name in seen:
            place.child("name", draft.name).wrong("another job has this name")
        seen.add(draft.name or "")
    total = sum(draft.tasks for draft in drafts)
    if total > MAX_TASKS:
        at.child("tasks", total).wrong(f"all jobs together may have at most {MAX_TASKS} tasks, but have {total}")
    return drafts


def _read_job(at: At) -> JobDraft:
    members = at.section(_JOB_KEYS)
    name = members["name"].name() if "name" in members else None
    if isinstance(at.value, dict):
        if "name" not in members:
            at.missing("name", "each job needs a name")
        if "run" not in members:
            at.missing("run", "give the command as a list, or a shell script as a string")
    role = members["role"].name() if "role" in members else name
    tasks = members["tasks"].integer(1, MAX_TASKS) if "tasks" in members else 1
    span_clusters = members["span_clusters"].truth() if "span_clusters" in members else False
    setup = read_script(members["setup"]) if "setup" in members else None
    argv, script = read_run(members["run"]) if "run" in members else ((), None)
    resources_at = members.get("resources", at)
    resources, types = _read_resources(resources_at) if "resources" in members else (ResourceSpec(), [])
    env = read_env(members["env"]) if "env" in members else {}
    secrets = read_secrets(members["secrets"], env) if "secrets" in members else {}
    return JobDraft(
        name=name,
        tasks=tasks or 1,
        resources=resources,
        resources_at=resources_at,
        types_at=types,
        secrets_at=[(place, secret) for place, secret in secrets.values()],
        fields={
            "role": role or "",
            "span_clusters": bool(span_clusters),
            "argv": argv,
            "script": script,
            "setup": setup,
            "env": env,
            "secrets": {variable_: secret for variable_, (_, secret) in secrets.items()},
        },
    )


def read_script(at: At) -> str | None:
    """Reads a shell script."""
    script = at.text("a shell script", MAX_COMMAND_BYTES)
    if script is not None and not script.strip():
        at.wrong("must not be empty")
    return script


def read_run(at: At) -> tuple[tuple[str, ...], str | None]:
    """Reads a command: an argv list, or a script. One of the two results is empty."""
    if isinstance(at.value, str):
        return (), read_script(at)
    if not isinstance(at.value, list):
        at.wrong("must be a command as a list of strings, or a shell script as one string")
        return (), None
    words = [(place, place.word("a string", MAX_COMMAND_BYTES)) for place in at.items("strings", MAX_ARGUMENTS)]
    if not at.value:
        at.wrong("must not be empty")
    elif words and words[0][1] is not None and not words[0][1].strip():
        words[0][0].wrong("must be the name of a program")
    argv = tuple(word for _, word in words if word is not None)
    size = sum(len(word.encode()) + 1 for word in argv)
    if size > MAX_COMMAND_BYTES:
        at.wrong(f"must have at most {MAX_COMMAND_BYTES} bytes, it has {size}")
    return argv, None


def _read_resources(at: At) -> tuple[ResourceSpec | None, list[tuple[At, str]]]:
    before = len(at.problems)
    members = at.section(_RESOURCE_KEYS)
    gpus = 0
    types: list[tuple[At, str]] = []
    if "accelerators" in members:
        gpus, types = accelerators(members["accelerators"]) or (0, [])
    cpus = cpus_milli(members["cpus"]) if "cpus" in members else None
    memory = size_bytes(members["memory"]) if "memory" in members else None
    if len(at.problems) > before:
        return None, types
    default = ResourceSpec()
    spec = ResourceSpec(
        gpus=gpus,
        gpu_types=tuple(name for _, name in types),
        cpus_milli=cpus or default.cpus_milli,
        memory_bytes=memory or default.memory_bytes,
    )
    return spec, types


def read_env(at: At) -> dict[str, str]:
    """Reads environment variables."""
    env = {}
    for name, place in at.entries("a mapping of variables to strings", MAX_VARIABLES).items():
        value = place.word("a string", _MAX_VALUE_BYTES)
        if variable(place, name) and value is not None:
            env[name] = value
    size = sum(len(name) + len(value.encode()) + 2 for name, value in env.items())
    if size > MAX_ENVIRONMENT_BYTES:
        at.wrong(f"must have at most {MAX_ENVIRONMENT_BYTES} bytes together, it has {size}")
    return env


def read_secrets(at: At, env: dict[str, str]) -> dict[str, tuple[At, str]]:
    """Reads the secret of each variable, with its position. `env` has the variables that are set otherwise."""
    secrets = {}
    for name, place in at.entries("a mapping of variables to names of secrets", MAX_VARIABLES).items():
        secret = place.name()
        if name in env:
            place.wrong("this variable is also set in env")
        elif variable(place, name) and secret is not None:
            secrets[name] = (place, secret)
    return secrets
