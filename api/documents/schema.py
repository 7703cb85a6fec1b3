"""The JSON Schema (2020-12) of the workload document, for the OpenAPI description, and an example.

The schema is only documentation. The module `workload` validates documents, with better messages.
"""

from typing import Any

from api.documents import jobs, workload
from domain.capacity import USUAL, CapacityKind
from domain.ids import NAME_PATTERN, NAME_RULE, TABLE_PATTERN, TABLE_RULE
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL

Schema = dict[str, Any]

EXAMPLE: Schema = {
    "version": 1,
    "name": "digits",
    "tenant": "vision",
    "labels": {"team": "demo"},
    "tables": ["digits"],
    "checkpoint": {"interval": "5s", "grace": "10s", "keep": 2},
    "limits": {"max_runtime": "1h", "max_silence": "2m", "retries": 1},
    "jobs": [
        {
            "name": "trainer",
            "role": "trainer",
            "tasks": 2,
            "resources": {"accelerators": ["a100:1", "v100:1"], "cpus": 1, "memory": "512MiB"},
            "run": ["python3", "train.py"],
            "env": {"EPOCHS": "10"},
            "secrets": {"HF_TOKEN": "hf-token"},
        }
    ],
}


def object_of(properties: dict[str, Schema], required: tuple[str, ...] = (), description: str = "") -> Schema:
    """Returns the schema of a mapping with these keys and no others."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = list(required)
    return schema | ({"description": description} if description else {})


def map_of(values: Schema, most: int, keys: str | None = None, description: str = "") -> Schema:
    """Returns the schema of a mapping with arbitrary keys, which match the pattern `keys` if it is given."""
    schema: Schema = {"type": "object", "additionalProperties": values, "maxProperties": most}
    if keys is not None:
        schema["propertyNames"] = {"pattern": keys}
    return schema | {"description": description}


NAME: Schema = {"type": "string", "pattern": NAME_PATTERN, "description": NAME_RULE}
_TABLE: Schema = {"type": "string", "pattern": TABLE_PATTERN, "description": TABLE_RULE}
DURATION: Schema = {
    "anyOf": [{"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$"}, {"type": "number", "minimum": 0}],
    "description": "30s, 10m, 2h, 1d, or a number of seconds",
}
ACCELERATOR: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}(:[0-9]{1,2})?$"}
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
WORD: Schema = {"type": ["string", "integer"]}

_RESOURCES = object_of(
    {
        "accelerators": {
            "anyOf": [ACCELERATOR, {"type": "array", "items": ACCELERATOR}],
            "description": "GPUs of each task, such as a100:8; a list gives acceptable types in order of preference",
        },
        "cpus": {"type": "number", "minimum": 0.001, "default": 1},
        "memory": {
            "anyOf": [{"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?\s*[KMGT]?i?B?$"}, {"type": "integer"}],
            "default": "1GiB",
            "description": "512MiB, 16GB, or a number of bytes",
        },
    },
    description="Resources of one task",
)
_JOB = object_of(
    {
        "name": NAME,
        "role": NAME | {"description": "Default: the name"},
        "tasks": {"type": "integer", "minimum": 1, "maximum": jobs.MAX_TASKS, "default": 1},
        "span_clusters": {
            "type": "boolean",
            "default": False,
            "description": "The tasks may span several clusters of a region if no single cluster can hold them all",
        },
        "resources": _RESOURCES,
        "setup": {
            "type": "string",
            "minLength": 1,
            "description": "A script as in run, run once in each task before it; if it fails, run is skipped",
        },
        "run": {
            "anyOf": [
                {
                    "type": "string",
                    "minLength": 1,
                    "description": "A script, run by the interpreter of its first line (#!), or by bash with -e",
                },
                {"type": "array", "items": WORD, "minItems": 1, "maxItems": jobs.MAX_ARGUMENTS},
            ]
        },
        "env": map_of(WORD, jobs.MAX_VARIABLES, VARIABLE, "Environment variables"),
        "secrets": map_of(NAME, jobs.MAX_VARIABLES, VARIABLE, "Environment variable to the name of a tenant's secret"),
    },
    required=("name", "run"),
    description="Identical tasks with a role; each task is a process group on one machine",
)
DOCUMENT: Schema = object_of(
    {
        "version": {"const": workload.VERSION, "default": workload.VERSION},
        "name": NAME,
        "tenant": NAME | {"description": "Optional if the API key has a tenant"},
        "labels": map_of({"type": "string"}, workload.MAX_LABELS, description="For filters; values are strings"),
        "priority": {
            "type": "integer",
            "minimum": HIGHEST_LEVEL,
            "maximum": LOWEST_LEVEL,
            "description": "A level below (numerically above) the tenant's; 1 is the highest",
        },
        "recurring": NAME | {"description": "Name shared by the runs of a recurring workload"},
        "jobs": {"type": "array", "items": _JOB, "minItems": 1, "maxItems": jobs.MAX_JOBS},
        "tables": {"type": "array", "items": _TABLE, "maxItems": workload.MAX_TABLES, "description": "Input tables"},
        "files": map_of(
            {"type": "string"}, workload.MAX_FILES, description="Relative path to text, put into the working directory"
        ),
        "workdir": {
            "anyOf": [
                object_of({"archive": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}, ("archive",)),
                {"type": "string", "pattern": "^[0-9a-f]{64}$"},
            ],
            "description": "SHA-256 of an archive that was uploaded with PUT /v1/archives/{sha256}",
        },
        "checkpoint": object_of(
            {
                "interval": DURATION,
                "grace": DURATION,
                "keep": {"type": "integer", "minimum": 1, "maximum": workload.MAX_KEPT},
                "max_failing": DURATION
                | {"description": "How long saves may fail in a row before the task ends; 1h by default"},
                "max_failures": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": workload.MAX_FAILURES,
                    "description": "How many saves in a row may fail before the task ends; not limited by default",
                },
            }
        ),
        "limits": object_of(
            {
                "max_runtime": DURATION,
                "max_silence": DURATION,
                "max_pending": DURATION,
                "retries": {"type": "integer", "minimum": 0, "maximum": workload.MAX_RETRIES},
            }
        ),
        "keep": DURATION
        | {"description": "How long the tasks' working directories stay on their machines after the end of an attempt"},
        "capacity": {
            "type": "array",
            "items": {"enum": [kind.value for kind in CapacityKind]},
            "minItems": 1,
            "uniqueItems": True,
            "default": list(USUAL),
            "description": "Capacity kinds on which the workload may run, in order of preference",
        },
        "regions": object_of(
            {"allow": {"type": "array", "items": NAME}, "exclude": {"type": "array", "items": NAME}},
        ),
    },
    required=("name", "jobs"),
    description="A workload: a gang that gets all its resources at once, in one region, or none",
)
