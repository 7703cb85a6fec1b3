"""The JSON Schemas of fleet files, scenarios and instances accept what the commands read, and nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel, ValidationError

from domain.documents import RuleError, json_schema, read
from infra.stack.fleet import Fleet
from research import schemas
from research.reclaim.scenario_files import ScenarioDocument
from research.traces.fleet import SimulatedFleet
from server.commands import group
from tests.schemas import check_equal, compare
from tetris.documents import InstanceDocumentError, instance_schema, read_instance

ROOT = Path(__file__).parents[2]
MACHINES = {"name": "n", "count": 2, "gpus": 8, "gpu_type": "a100", "cpus": 96, "memory": "512GiB"}
FLEET: dict[str, Any] = {
    "version": 1,
    "regions": [
        {
            "name": "east",
            "clusters": [{"name": "a", "machines": [MACHINES], "capacity": "spot", "prices": {"cpu": 0.5}}],
        }
    ],
}
SIMULATED: dict[str, Any] = {
    **FLEET,
    "tenants": {"vision": {"level": 2, "quota": {"a100": 8}, "cpus": None}},
    "tables": {"t": ["east"]},
    "simulation": {"objective_s": {"1": 60}, "priority_percent": {"7": 10}, "candidate_regions_percent": {"2": 50}},
    "pools": [{"region": "east", "name": "p", "size": 1, "max_size": 2}],
    "providers": {
        "cloud": {
            "zones": {"z": {"region": "east", "counts": [1, 2]}},
            "machine_types": {"m": {"gpus": 8, "gpu_type": "a100", "usd_per_h": 3}},
        }
    },
}
SCENARIO: dict[str, Any] = {
    "version": 1, "name": "x", "start": "2026-03-02", "days": 5, "calibration_days": 1,
    "machines": [{"count": 2, "gpus": 4}], "availability": {"drawn": {"departures": 10}},
    "departures": {"notice_median_s": 60}, "peaks": {"hours": [[11, 13]]}, "jobs": {"gpus": {"1": 0.5}},
}  # fmt: skip
INSTANCE: dict[str, Any] = {
    "version": 1,
    "weights": {"read": 1, "by_priority": {"1": 2}},
    "regions": [{"name": "r1", "storage_bytes": 10, "gpu_hours": {"a": 1}}, {"name": "r2", "storage_bytes": 10}],
    "tables": [{"name": "t1", "size_bytes": 1, "home": "r1", "replicas": ["r2"]}],
    "jobs": [{"name": "j1", "kind": "ml", "tables": ["t1"], "priority": 2}],
}
NAMES, REFERENCES = instance_schema()["description"].split(". ")[1:]
MODELS: dict[str, tuple[type[BaseModel], Any]] = {
    "fleet": (Fleet, FLEET), "simulated fleet": (SimulatedFleet, SIMULATED), "scenario": (ScenarioDocument, SCENARIO),
}  # fmt: skip


def rules(model: type[BaseModel], body: Any) -> list[str | None]:
    """Returns the rule of each problem of a document; None if the schema must state the problem."""
    try:
        read(model, body)
    except ValidationError as error:
        found = error.errors()
        inner = {one["loc"][:length] for one in found for length in range(len(one["loc"]))}
        # pydantic also reports a list with invalid entries as too short.
        causes = [one.get("ctx", {}).get("error") for one in found if one["loc"] not in inner]
        return [cause.rule if isinstance(cause, RuleError) else None for cause in causes]
    return []


def rules_of_instance(body: Any) -> list[str | None]:
    """Returns the rule of each problem of an instance."""
    try:
        read_instance(json.dumps(body))
    except InstanceDocumentError as error:
        found: list[str | None] = []
        for line in str(error).splitlines():
            unique = re.search(r"\.name: .* appears twice", line)
            known = re.search(r"is not a (region|table) of the|is the table's home|appears twice|^and \d+ more$", line)
            found.append(NAMES if unique else REFERENCES if known else None)
        return found
    return []


@pytest.mark.parametrize("name", MODELS)
def test_generated_documents(name: str) -> None:
    """The schema and the model agree about documents that are generated from the schema, and about damaged ones."""
    model, valid = MODELS[name]
    schema = json_schema(model)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert rules(model, valid) == []
    compare(schema, lambda body: rules(model, body), [valid], 2500)


def test_generated_instances() -> None:
    """The schema and the reader agree about instances that are generated from the schema, and about damaged ones."""
    schema = instance_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert rules_of_instance(INSTANCE) == []
    compare(schema, rules_of_instance, [INSTANCE], 2500)


CASES: list[tuple[str, list[Any]]] = [
    ("memory", ["16GB", "0B", "1", "64TiB", "65TiB", 1 << 20, 1024, 1.5, "512mib", "1 GiB", " 1GiB", None, True]),
    ("gpus", [0, 62, 63, -1, 1.0, 1.5, "8", True, None]),
    ("cpus", [0, 0.5, "8", True, None, -1]),
    ("count", [0, 1, 1000, 1001, 1.0, None, "2"]),
    ("name", ["a", "A", "a\n", "", "x" * 64, 1, None]),
]


@pytest.mark.parametrize("model", [Fleet, SimulatedFleet])
@pytest.mark.parametrize(("field", "values"), CASES)
def test_values_of_machines(model: type[BaseModel], field: str, values: list[Any]) -> None:
    """For each value of a field of a machine, the schema and the model agree whether it is valid."""
    schema = json_schema(model)
    for value in values:
        cluster = {"name": "a", "machines": [{**MACHINES, field: value}]}
        body = {"regions": [{"name": "east", "clusters": [cluster]}]}
        check_equal(schema, lambda body: rules(model, body), body)


@pytest.mark.parametrize(
    "start",
    ["2026-03-02", "2026-03-02T08:00", "2026-03-02 08:00:00.5+01:00", "2026-02-30", "2026-3-2", "soon", "5", 5, None],
)
def test_times_of_scenarios(start: Any) -> None:
    """For each way to write the start of a scenario, the schema and the model agree whether it is valid."""
    check_equal(json_schema(ScenarioDocument), lambda body: rules(ScenarioDocument, body), {**SCENARIO, "start": start})


@pytest.mark.parametrize("kind", ["workload", "service", "fleet", "instance", *schemas.KINDS])
def test_schemas_are_printed(kind: str) -> None:
    """The commands print the schema of each kind of document, which is a valid schema."""
    printed = CliRunner().invoke(*((schemas.main, [kind]) if kind in schemas.KINDS else (group, ["json-schema", kind])))
    assert printed.exit_code == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(printed.output))


def test_files_of_the_repository_are_valid() -> None:
    """The schema of scenarios accepts those of the experiments."""
    files = sorted(ROOT.glob("research/experiments/reclaim/scenarios/*.yaml"))
    assert files
    for file in files:
        body = json.loads(json.dumps(yaml.safe_load(file.read_text()), default=str))
        check_equal(json_schema(ScenarioDocument), lambda body: rules(ScenarioDocument, body), body)
        assert rules(ScenarioDocument, body) == []
