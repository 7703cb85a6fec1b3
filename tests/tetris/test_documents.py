"""Instances and plans as JSON: round trips, and errors that name the wrong field."""

import json
from typing import Any

import pytest

from domain.instance import Reads, reads_document
from tests.tetris.small import small_instance
from tetris import documents


def body() -> dict[str, Any]:
    """Returns a small valid instance."""
    return {
        "version": 1,
        "regions": [{"name": "r1", "storage_bytes": 10, "gpu_hours": {"a": 1}}, {"name": "r2", "storage_bytes": 10}],
        "tables": [{"name": "t1", "size_bytes": 1, "home": "r1", "replicas": ["r2"]}],
        "jobs": [{"name": "j1", "kind": "ml", "tables": ["t1"], "priority": 2}],
    }


@pytest.mark.parametrize("seed", range(5))
def test_round_trip(seed: int) -> None:
    """An instance is equal after writing and reading."""
    instance = small_instance(seed)
    assert documents.read_instance(json.dumps(documents.instance_document(instance))) == instance


def test_reads_round_trip() -> None:
    """The reads of jobs are equal after writing and reading, and errors name the wrong field."""
    reads = Reads({"t/1": 1.0, "t/2": 0.0}, {"j": ("t/1", "t/2"), "k": ("t/2",)})
    assert documents.read_reads(json.dumps(reads_document(reads))) == reads
    for change, said in (
        ({"partitions": {"t": 1}}, "partitions.t: must be table/partition"),
        ({"partitions": {"t/1": -1}}, "partitions.t/1: -1"),
        ({"reads": [{"job": "j", "partitions": []}]}, "reads.0.partitions: []"),
        ({"reads": [{"job": "j", "partitions": ["t/"]}]}, "reads.0.partitions.0: 't/'"),
        ({"reads": [{"job": "j", "partitions": ["t/1"]}] * 2}, "reads: job 'j' appears twice: each job must"),
    ):
        with pytest.raises(documents.InstanceDocumentError) as refused:
            documents.read_reads(json.dumps({**reads_document(reads), **change}))
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("version",), 2, "version: 2: this program reads version 1"),
        (("regions",), [], "regions: []"),
        (("regions", 0, "storage_bytes"), -1, "regions.0.storage_bytes: -1"),
        (("regions", 0, "gpu_hours"), {"a": "x"}, "regions.0.gpu_hours.a: 'x'"),
        (("regions", 1, "name"), "r1", "regions.1.name: 'r1' appears twice"),
        (("tables", 0, "size_bytes"), float("inf"), "tables.0.size_bytes: inf"),
        (("tables", 0, "home"), "r3", "tables.0.home: 'r3' is not a region of the instance; it has r1, r2"),
        (("tables", 0, "replicas"), ["r1"], "tables.0.replicas: 'r1' is the table's home"),
        (("tables", 0, "replicas"), ["r2", "r2"], "tables.0.replicas: 'r2' appears twice"),
        (("jobs", 0, "kind"), "flink", "jobs.0.kind: 'flink'"),
        (("jobs", 0, "priority"), 8, "jobs.0.priority: 8"),
        (("jobs", 0, "tables"), ["t2"], "jobs.0.tables: 't2' is not a table of the instance; it has t1"),
        (("jobs", 0, "gpus"), 1, "jobs.0.gpus: 1"),
        (("weights",), {"by_priority": {"9": 1}}, "weights.by_priority.9: must be '1', '2'"),
        (("home_threshold",), 1.5, "home_threshold: 1.5"),
        (("move_quota_bytes",), -1, "move_quota_bytes: -1: must be 0, or from 1e-20 to 1e+20"),
        (("tables", 0, "size_bytes"), 1e21, "tables.0.size_bytes: 1e+21: must be 0, or from 1e-20 to 1e+20"),
        (("tables", 0, "size_bytes"), 5e-324, "tables.0.size_bytes: 5e-324: must be 0, or from 1e-20 to 1e+20"),
        (("tables", 0, "size_bytes"), 10**400, "tables.0.size_bytes: 1000"),
        (("tables", 0, "size_bytes"), "5", "tables.0.size_bytes: '5': must be a number"),
        (("regions", 0, "storage_bytes"), True, "regions.0.storage_bytes: True: must be a number"),
        (("jobs", 0, "priority"), 2.5, "jobs.0.priority: 2.5: must be a whole number"),
        (("jobs", 0, "priority"), True, "jobs.0.priority: True: must be a whole number"),
        (("jobs", 0, "tables"), "t1", "jobs.0.tables: 't1': must be a list"),
        (("jobs", 0), [], "jobs.0: []: must be an object"),
        (("jobs", 0, "app"), "", "jobs.0.app: '': must not be empty"),
        (("version",), True, "version: True: this program reads version 1"),
        (("weights",), {"gpu": 1e308}, "weights.gpu: 1e+308: must be 0, or from"),
    ],
)
def test_errors_name_the_field(path: tuple[Any, ...], value: Any, said: str) -> None:
    """An unusable instance is rejected with the field, the value and what would be right."""
    given = body()
    at: Any = given
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(documents.InstanceDocumentError) as refused:
        documents.read_instance(json.dumps(given))
    assert said in str(refused.value)


def test_what_is_missing_is_named() -> None:
    """A missing field is named in the error, and malformed JSON is rejected."""
    given = body()
    del given["tables"][0]["home"]
    with pytest.raises(documents.InstanceDocumentError, match=r"tables\.0\.home: missing"):
        documents.read_instance(json.dumps(given))
    with pytest.raises(documents.InstanceDocumentError, match="not JSON"):
        documents.read_instance("{")
    with pytest.raises(documents.InstanceDocumentError, match="nested too deeply"):
        documents.read_instance("[" * 100_000)
    with pytest.raises(documents.InstanceDocumentError, match=r"document: \[\]: must be an object"):
        documents.read_instance("[]")


def test_what_is_there_twice_is_named() -> None:
    """A duplicate field of any object is reported with its path, in instances and in plans."""
    text = json.dumps(body())
    for wrong, where in (
        (text.replace('"home": "r1"', '"home": "r1", "home": "r2"'), r"tables\.0\.home: duplicate field"),
        (text.replace('{"a": 1}', '{"a": 1, "a": 2}'), r"regions\.0\.gpu_hours\.a: duplicate field"),
        (text.replace('"version": 1', '"version": 1, "version": 1'), "^version: duplicate field"),
    ):
        with pytest.raises(documents.InstanceDocumentError, match=where):
            documents.read_instance(wrong)
    with pytest.raises(documents.InstanceDocumentError, match=r"homes\.t1: duplicate field"):
        documents.read_plan('{"version": 1, "homes": {"t1": "r1", "t1": "r2"}}', ("t1",), ("r1", "r2"))


def test_a_plan_names_what_is_there() -> None:
    """A plan may name only tables and regions of the instance."""
    names = documents.names_of(documents.read_instance(json.dumps(body())))
    written = json.dumps(documents.plan_document({"t1": "r2"}))
    assert documents.read_plan(written, *names) == {"t1": "r2"}
    with pytest.raises(documents.InstanceDocumentError, match="homes: 't9' is not a table of the instance; it has t1"):
        documents.read_plan('{"version": 1, "homes": {"t9": "r1"}}', *names)
    with pytest.raises(
        documents.InstanceDocumentError, match=r"homes\.t1: 'r9' is not a region of the instance; it has r1, r"
    ):
        documents.read_plan('{"version": 1, "homes": {"t1": "r9"}}', *names)
