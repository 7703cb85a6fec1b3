"""The workload document: the declaration of its fields, and the specification that a valid document becomes."""

from typing import Any

from api.documents.after import IF_NEVER, NOT_BEFORE, after
from api.documents.array import ARRAY, ARRAY_RULES, check_array
from api.documents.forms import (
    NAME,
    SCRIPT,
    TRUTH,
    UNICODE,
    Field,
    Form,
    Keys,
    cases,
    constant,
    duration,
    integer,
    list_of,
    map_of,
    name,
    number,
    one_of,
    section,
    size,
    text,
    word,
)  # fmt: skip
from api.documents.notify import NOTIFY, NOTIFY_RULES, check_each
from api.documents.position import At
from api.documents.retries import RETRIES
from api.documents.syntax import Value
from api.documents.task_range import ALONE, NO_SLICES, TASKS, check_elastic
from api.documents.task_range import RULES as ELASTIC_RULES
from api.documents.topology_rules import MAX_TASKS, RULES, TOPOLOGY, check_topology
from api.problems import FieldError
from domain.capacity import OWN, USUAL, CapacityKind
from domain.ids import DEFAULT_NAMESPACE, NAME_PATTERN, NAME_RULE, TABLE_PATTERN, TABLE_RULE
from domain.images import IMAGE_PATTERN, IMAGE_RULE, MAX_IMAGE
from domain.isolation import Isolation
from domain.patterns import matching, whole_numbers
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL
from domain.slots import MAX_SLOTS
from domain.spec import CheckpointSpec, JobSpec, LimitsSpec, ResourceSpec, WorkloadSpec

VERSION = 1
MAX_COMMAND_BYTES = 96 << 10
_MAX_FILES_BYTES = 256 << 10
_MAX_ENVIRONMENT_BYTES = 64 << 10
_MAX_VARIABLES = 256
_MAX_PATH_BYTES, _MAX_PART_BYTES = 1024, 255
_LONGEST_S = 366 * 86400
_UNTIL = "-complete-until"
"""Suffix of the environment variable with the time up to which a stale table is complete."""

# ----------------------------------------------------------------------------------------------------------- resources

TYPE_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_ACCELERATOR = "must be an accelerator and a number of them, such as a100:8"
_COUNTED = text("an accelerator such as a100:8", 100, f"^{TYPE_PATTERN}(:(0|[1-9][0-9]{{0,3}}))?$", _ACCELERATOR)
_SAME_COUNT = "All entries have the same number of GPUs, and different types"


def _accelerator(at: At) -> Any:
    given = _COUNTED.read(at)
    if given is None:
        return None
    gpu_type, _, count = given.partition(":")
    if count and not 1 <= int(count) <= MAX_SLOTS:
        return at.wrong(f"a task can have 1 to {MAX_SLOTS} GPUs, this asks for {count}")
    at.name("GPU type", gpu_type)
    return gpu_type, int(count or 1)


ACCELERATOR = Form(matching(f"^{TYPE_PATTERN}(:{whole_numbers(1, MAX_SLOTS)})?$"), _accelerator)
"""A GPU type and the number of GPUs of a task, such as `a100:8`; `a100` means one. The value is a pair of both."""


def _same_count(at: At, one: tuple[str, int], before: list[tuple[str, int]]) -> None:
    if before and one[1] != (first := before[0][1]):
        message = f"all entries must have the same number of GPUs; the first has {first}, this has {one[1]}"
        at.wrong(message, rule=_SAME_COUNT)
    elif one in before:
        at.wrong("is given twice", rule=_SAME_COUNT)


def _gpus(read: list[tuple[str, int]]) -> dict[str, Any]:
    return {"gpus": read[0][1] if read else 0, "gpu_types": tuple(gpu_type for gpu_type, _ in read)}


def milli(cores: float) -> int:
    """Returns thousandths of a core for a number of cores."""
    return max(1, round(cores * 1000))


_ACCELERATORS = list_of(ACCELERATOR, "accelerators such as a100:8", 16, unique=True, each=(_same_count, _SAME_COUNT))
CORES = number(0.001, 10_000)
LEAST_MEMORY_BYTES, MOST_MEMORY_BYTES = 1 << 20, 1 << 46
MEMORY = size(LEAST_MEMORY_BYTES, MOST_MEMORY_BYTES, "1MiB to 64TiB")
RESOURCES = section({
    "accelerators": Field(
        cases({str: ACCELERATOR.to(lambda one: _gpus([one])), list: _ACCELERATORS.to(_gpus)},
              "must be a list of accelerators such as a100:8, it is {}"),
        "GPUs of each task, such as a100:8; a list gives acceptable types in order of preference", to=""),
    "cpus": Field(CORES.to(milli), "Cores", "cpus_milli", default=1),
    "memory": Field(MEMORY, to="memory_bytes", default="1GiB"),
}, "Resources of one task", ResourceSpec)  # fmt: skip

# ------------------------------------------------------------------------------------------------------- fields of jobs

_COMMAND_SIZE = f"All strings together have at most {MAX_COMMAND_BYTES} bytes, with one more for each"
_ENV_SIZE = f"All variables together have at most {_MAX_ENVIRONMENT_BYTES} bytes, with two more for each"
_NOT_BOTH = "A variable of secrets is not in env"


def _command(at: At, words: list[str]) -> dict[str, Any]:
    found = sum(len(one.encode()) + 1 for one in words)
    if found > MAX_COMMAND_BYTES:
        at.wrong(f"must have at most {MAX_COMMAND_BYTES} bytes, it has {found}", rule=_COMMAND_SIZE)
    return {"argv": tuple(words)}


def _environment(at: At, env: dict[str, str]) -> dict[str, str]:
    found = sum(len(key) + len(value.encode()) + 2 for key, value in env.items())
    if found > _MAX_ENVIRONMENT_BYTES:
        at.wrong(f"must have at most {_MAX_ENVIRONMENT_BYTES} bytes together, it has {found}", rule=_ENV_SIZE)
    return env


def set_once(at: At, values: dict[str, Any]) -> dict[str, Any]:
    """Adds an error for each variable that both `env` and `secrets` set, and returns the values."""
    for variable in values.get("secrets", {}).keys() & values.get("env", {}).keys():
        at.get("secrets", variable).wrong("this variable is also set in env", rule=_NOT_BOTH)
    return values


_VARIABLE = Keys(
    "^[A-Za-z_][A-Za-z0-9_]{0,255}$",
    "a variable's name must have letters, digits and underscores, and not begin with a digit",
    {
        "^MIZZEN_": "variables that begin with MIZZEN_ are reserved",
        "^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES)$":
            "{} is set by mizzen for each task",
    },
)  # fmt: skip


def environment_of(value: Form) -> Form:
    """Returns the form of environment variables with values of a form."""
    form = map_of(_VARIABLE, value, "a mapping of variables to strings", _MAX_VARIABLES)
    return form.checked(_environment, _ENV_SIZE)


def secrets_of(value: Form) -> Field:
    """Returns the field of environment variables with names of secrets, which have a form."""
    form = map_of(_VARIABLE, value, "a mapping of variables to names of secrets", _MAX_VARIABLES)
    return Field(form, f"Environment variable to the name of a tenant's secret. {_NOT_BOTH}")


_SCRIPT = text("a shell script", MAX_COMMAND_BYTES, SCRIPT, "must not be empty", in_bytes=True)
_PROGRAM = word(text("a string", MAX_COMMAND_BYTES, SCRIPT, "must be the name of a program"))
_RUN = cases({
    str: _SCRIPT.to(lambda script: {"script": script}),
    list: list_of(word(text(most=MAX_COMMAND_BYTES)), "strings", 1024, empty="must not be empty", first=_PROGRAM)
    .checked(_command, _COMMAND_SIZE),
}, "must be a command as a list of strings, or a shell script as one string")  # fmt: skip
RUN = "A list is a command. A string is a script, run by the interpreter of its first line (#!), or by bash with -e"
COMMANDS = {
    "setup": Field(
        _SCRIPT, "A script as in run, which runs before it, once on each machine; if it fails, run is skipped"
    ),
    "run": Field(_RUN, RUN, ""),
    "env": Field(environment_of(word(text(most=32 << 10))), "Environment variables"),
    "secrets": secrets_of(name("secret")),
}
IMAGE = text("a container image", MAX_IMAGE, IMAGE_PATTERN, f"must be {IMAGE_RULE}")
_NEEDS_RUN = "Needed unless the job has an image with a command of its own"
NO_SETUP = "A job with an image has no setup"
_NO_RESTART = "The tasks of a job with an image are not started again alone"
NO_PULL = "Only a job with an image has image_pull_secret"


def _command_or_image(at: At, values: dict[str, Any]) -> dict[str, Any]:
    if values.get("image") is not None:
        if "setup" in values:
            message = "not possible with image: install what the job needs in the image, or do it in run"
            at.get("setup").wrong(message, rule=NO_SETUP)
        if values.get("restart") == "task":
            at.get("restart").wrong("not possible with image: leave it out, or write gang", rule=_NO_RESTART)
    else:
        if at.get("run").value is None and at.get("image").value is None:
            at.missing("run", "give the command as a list, or a shell script as a string", rule=_NEEDS_RUN)
        if "image_pull_secret" in values:
            at.get("image_pull_secret").wrong("only possible with image", rule=NO_PULL)
    return values


_SPAN = "The tasks may span several clusters of a region if no single cluster can hold them all"
JOB = section({
    "name": Field(NAME, missing="each job needs a name"),
    "role": Field(NAME, "Default: the name"),
    "tasks": Field(TASKS, f"A number, or the fewest and the most. {ALONE}. {NO_SLICES}", "", default=1),
    "span_clusters": Field(TRUTH, _SPAN, default=False),
    "topology": Field(TOPOLOGY),
    "resources": Field(RESOURCES),
    **COMMANDS,
    "run": Field(_RUN, f"{RUN}. Replaces the entry point of an image. {_NEEDS_RUN}", ""),
    "restart": Field(one_of(("gang", "task"), "gang or task"), "What is started again after the failure of a task: the "
                     f"workload, or the task alone, on its machine. {_NO_RESTART}", default="gang"),
    "output": Field(one_of(("merged", "separate"), "merged or separate"), "Whether the log can tell stdout and stderr "
                    "apart; separate keeps their order only to about a second", default="merged"),
    "image": Field(IMAGE, "A container image in which the tasks run, on machines with a container engine"),
    "image_pull_secret": Field(name("secret"), "Name of the tenant's secret with USER:PASSWORD for the image's "
                               f"registry. {NO_PULL}"),
}, "Identical tasks with a role; each task is a process group on one machine").checked(
    lambda at, values: check_topology(at, _command_or_image(at, set_once(at, values))), _NOT_BOTH, _NEEDS_RUN,
    NO_SETUP, NO_PULL, _NO_RESTART, *RULES,
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- fields of workloads

_UNIQUE_JOBS = "Names of jobs are unique"
_ALL_TASKS = f"All jobs together have at most {MAX_TASKS} tasks"
_PATH_SIZE = f"A path has at most {_MAX_PATH_BYTES} bytes, and at most {_MAX_PART_BYTES} in each part"
_FILES_SIZE = f"All files together have at most {_MAX_FILES_BYTES} bytes"
_NO_FOLDERS = "No file is also the folder of another one"
_TABLES_DIFFER = "No two tables have the same environment variable"
TENANT_RULE = "Needed unless the API key has a tenant"


def _gang(at: At, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen: set[str] = set()
    for position, job in enumerate(jobs):
        if job.get("name") in seen:
            at.child(position, at.value[position]).get("name").wrong("another job has this name", rule=_UNIQUE_JOBS)
        seen.add(job.get("name", ""))
    total = sum(job.get("most_tasks", job.get("tasks", 1)) for job in jobs)
    if total > MAX_TASKS:
        message = f"all jobs together may have at most {MAX_TASKS} tasks, but have {total}"
        at.child("tasks", total).wrong(message, rule=_ALL_TASKS)
    return jobs


def _files(at: At, files: dict[str, str]) -> dict[str, str]:
    for path, content in files.items():
        if len(path.encode()) > _MAX_PATH_BYTES or any(len(p.encode()) > _MAX_PART_BYTES for p in path.split("/")):
            message = f"must have at most {_MAX_PATH_BYTES} bytes, and at most {_MAX_PART_BYTES} in each part"
            at.child(path, content).wrong(message, rule=_PATH_SIZE)
    folders = {path[:end] for path in files for end in range(len(path)) if path[end] == "/"}
    for path in sorted(folders & files.keys()):
        at.child(path, files[path]).wrong("is a file, but other files use it as a folder", rule=_NO_FOLDERS)
    found = sum(len(content.encode()) for content in files.values())
    if found > _MAX_FILES_BYTES:
        most = f"all files together may have at most {_MAX_FILES_BYTES} bytes"
        at.wrong(f"{most}, but have {found}; use workdir for more", rule=_FILES_SIZE)
    return files


def _other_variable(at: At, table: str, before: list[str]) -> None:
    found = {one.replace(".", "--"): one for one in before}
    variable = table.replace(".", "--")
    other = found.get(variable.removesuffix(_UNTIL)) or found.get(variable + _UNTIL) or found.get(variable)
    if other is not None:
        message = f"conflicts with {other}: both tables have the same environment variable"
        at.wrong(message, rule=_TABLES_DIFFER)


def workdir(command: str) -> Field:
    """Returns the field of an archive. `command` uploads a folder; the message about a path names it."""
    digest, pattern = "the SHA-256 of an uploaded archive", "^[0-9a-f]{64}$"
    path = (
        f"the API does not accept a path: use `{command}`, which uploads the folder, or upload a tar.gz with "
        "PUT /v1/archives/<sha256> and write workdir: {archive: <sha256>}"
    )
    archive = text(digest, 64, pattern, f"must be {digest}, 64 hexadecimal digits in lower case")
    mapping = section({"archive": Field(archive, missing="give the SHA-256 of an uploaded archive")})
    form = cases({str: text(digest, 1000, pattern, path), dict: mapping.to(lambda found: found.get("archive"))},
                 f"must be {digest}, it is {{}}")  # fmt: skip
    return Field(form, "SHA-256 of an archive that was uploaded with PUT /v1/archives/{sha256}")


_LABEL = Keys(
    "^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$",
    "a label's key must have 1 to 63 letters, digits or . _ / - and begin and end with a letter or digit", {},
)  # fmt: skip
_CHARACTER = r"[^/\x00-\x1f\x7f]"
PATH_PART = rf"([^/.\x00-\x1f\x7f]{_CHARACTER}*|\.[^/.\x00-\x1f\x7f]{_CHARACTER}*|\.\.{_CHARACTER}+)"
_PATH = Keys(
    f"^{PATH_PART}(/{PATH_PART})*$",
    "must be a normalised relative path, such as configs/model.yaml, that stays in the working directory", {},
)  # fmt: skip
_OUTPUT_PATH = text("the path of a file or folder in the working directory", _MAX_PATH_BYTES,
                    rf"^(\./)?{PATH_PART}(/{PATH_PART})*/?$",
                    "must be a normalised relative path, such as ./out, that stays in the working directory",
                    )  # fmt: skip
_OUTPUT_NAME = Keys(NAME_PATTERN, f"an output's name must be {NAME_RULE}", {})
_TABLE = text("a table's name", 127, TABLE_PATTERN, f"must be a table's name: {TABLE_RULE}", kind="table",
              never=(rf"^{DEFAULT_NAMESPACE}\.",))  # fmt: skip
_KINDS = (*(kind.value for kind in CapacityKind), OWN)
_NO_KIND = f"must contain at least one of {', '.join(_KINDS)}; the default is {', '.join(USUAL)}"
_REGION = name("region")
_TIME = duration(1, _LONGEST_S)
COMMON = {
    "tenant": Field(NAME, TENANT_RULE),
    "labels": Field(map_of(_LABEL, text(most=256), "a mapping of strings to strings", 64), "For filters"),
    "priority": Field(integer(HIGHEST_LEVEL, LOWEST_LEVEL),
                      "A level below (numerically above) the tenant's; 1 is the highest", "level"),
    "files": Field(
        map_of(_PATH, text(most=_MAX_FILES_BYTES), "a mapping of relative paths to strings", 256)
        .checked(_files, _PATH_SIZE, _FILES_SIZE, _NO_FOLDERS),
        "Relative path to text, put into the working directory"),
}  # fmt: skip
CHECKPOINT = section({
    "interval": Field(duration(0.1, _LONGEST_S), "Time between two saves; by default tasks compute it", "interval_s"),
    "grace": Field(duration(0, 3600), "Time from SIGTERM to SIGKILL", "grace_s"),
    "keep": Field(integer(1, 100), "Number of checkpoints that are kept"),
    "max_failing": Field(_TIME, "How long saves may fail in a row before the task ends; 1h by default",
                         "max_failing_s"),
    "max_failures": Field(integer(1, 100_000), "How many saves in a row may fail before the task ends; not limited by "
                          "default"),
}, model=CheckpointSpec)  # fmt: skip
LIMITS = section({
    "max_runtime": Field(_TIME, "Running time of all attempts together", "max_runtime_s"),
    "max_silence": Field(_TIME, "A gang without progress, output and checkpoint for this long is restarted",
                         "max_silence_s"),
    "max_pending": Field(_TIME, "Time in the queue without a break, after which the workload fails", "max_pending_s"),
    "retries": RETRIES,
}, model=LimitsSpec)  # fmt: skip
REGIONS = section({
    "allow": Field(
        list_of(_REGION, "regions", 256, empty="must contain at least one region; omit it to allow all", unique=True)
        .to(tuple), "Default: all", "regions_allowed"),
    "exclude": Field(list_of(_REGION, "regions", 256, unique=True).to(tuple), to="regions_excluded"),
})  # fmt: skip
WORKLOAD = section({
    "version": Field(constant(VERSION, f"must be {VERSION}, the only supported version"), default=VERSION),
    "name": Field(NAME, missing="the workload needs a name"),
    **COMMON,
    "recurring": Field(NAME, "Name shared by the runs of a recurring workload"),
    "jobs": Field(
        list_of(JOB, "jobs", 32, empty="must have at least one job").checked(_gang, _UNIQUE_JOBS, _ALL_TASKS),
        missing="the workload needs at least one job"),
    "array": ARRAY,
    "tables": Field(list_of(_TABLE, "tables", 64, unique=True, each=(_other_variable, _TABLES_DIFFER)), "Input tables"),
    "workdir": workdir("mizzen submit"),
    "outputs": Field(
        map_of(_OUTPUT_NAME, _OUTPUT_PATH.to(lambda path: path.removeprefix("./").rstrip("/")),
               "a mapping of names to relative paths", 32),
        "Name to the path of a file or folder in the working directory of each task. It is stored when the task ends, "
        "and `mizzen get` fetches it"),
    "after": after(_TABLE),
    "not_before": NOT_BEFORE,
    "if_never": IF_NEVER,
    "notify": NOTIFY,
    "checkpoint": Field(CHECKPOINT),
    "limits": Field(LIMITS),
    "regions": Field(REGIONS, to=""),
    "capacity": Field(
        list_of(one_of(_KINDS, "a kind of capacity"), "kinds of capacity", len(_KINDS), empty=_NO_KIND, unique=True),
        f"Kinds on which the workload may run, in order of preference; default: {', '.join(USUAL)}. "
        f"`{OWN}`: machines that only the tenant may use (`mizzen pilots`)"),
    "keep": Field(duration(0, _LONGEST_S), "How long the tasks' working directories stay on their machines after the "
                  "end of an attempt", "keep_s"),
    "isolation": Field(one_of(tuple(mode.value for mode in Isolation), "a mode of isolation").to(Isolation),
                       "The weakest isolation of tasks on machines where the workload may run; default: the tenant's"),
}, f"A workload: a gang that gets all its resources at once, in one region, or none. {UNICODE}"
).checked(check_elastic, *ELASTIC_RULES).checked(check_array, *ARRAY_RULES).checked(
    check_each, *NOTIFY_RULES
)  # fmt: skip


class Draft:
    """The valid fields of a document, its errors, and the positions of values that must be checked further."""

    def __init__(self, form: Form, value: Value, default_tenant: str | None) -> None:
        """Reads the document `value`. If it names no tenant, that of the caller's key, `default_tenant`, is used."""
        self.at = At("", value)
        self.fields: dict[str, Any] = form.read(self.at)
        has_tenant = self.at.get("tenant").value is not None
        self.tenant: str | None = self.fields.get("tenant") if has_tenant else default_tenant
        if isinstance(value, dict) and not has_tenant and default_tenant is None:
            self.at.missing("tenant", "only a key with a tenant can omit it", rule=TENANT_RULE)

    @property
    def problems(self) -> list[FieldError]:
        """The errors of the document. Later checks add errors to this list."""
        return self.at.problems


class WorkloadDraft(Draft):
    """The draft of a workload document."""

    def __init__(self, value: Value, default_tenant: str | None) -> None:
        """See `Draft`."""
        super().__init__(WORKLOAD, value, default_tenant)

    @property
    def jobs(self) -> list[tuple[At, dict[str, Any]]]:
        """The valid fields of each job, with its position."""
        at = self.at.get("jobs")
        return [(at.child(n, at.value[n]), job) for n, job in enumerate(self.fields.get("jobs", []))]

    def spec(self) -> WorkloadSpec:
        """Returns the specification. Call it only if the document has no errors."""
        defaults = {"tasks": 1, "resources": ResourceSpec()}
        jobs = tuple(JobSpec(**{"role": job["name"], **defaults, **job}) for job in self.fields["jobs"])
        return WorkloadSpec(**{**self.fields, "tenant": self.tenant, "jobs": jobs})


read_workload = WorkloadDraft
