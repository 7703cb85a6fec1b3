"""The published schemas of the workload and the service document accept what the API accepts, and nothing else."""

from typing import Any

import jsonschema
import pytest

from api.documents.schema import DOCUMENT, EXAMPLE, SERVICE_DOCUMENT, SERVICE_EXAMPLE
from api.documents.service import read_service
from api.documents.workload import read_workload
from tests.api.documents import JOB, job, resources
from tests.api.world import document
from tests.schemas import check_equal, compare


def rules_of_workload(body: Any) -> list[str | None]:
    return [problem.rule for problem in read_workload(body, "vision").problems]


def rules_of_service(body: Any) -> list[str | None]:
    return [problem.rule for problem in read_service(body, "vision", "chat").problems]


VALUES: dict[str, list[Any]] = {
    "version": [1, 2, "1", 1.0, True, None],
    "name": ["", "a", "A b", "x" * 63, "x" * 64, "-a", "a-", "a.b", "ü", "a\n", 1, None],
    "priority": [0, 1, 7, 8, 1.0, "1", True, None],
    "tables": [[], ["a"], ["a", "a"], ["a.b"], ["a.b", "a--b"], ["default.a"], ["x/y"], ["A"], "a", None],
    "labels": [{}, {"a": "b"}, {"a": 1}, {"": "x"}, {"A B": "x"}, {"a": ""}, {"a": None}, {"a": "é" * 200}, None],
    "capacity": [["reserved"], ["spot", "spot"], ["x"], [], "reserved", None],
    "regions": [["east"], {"allow": ["e"]}, {"allow": []}, {"exclude": ["e", "e"]}, {"deny": ["e"]}, None],
    "files": [{"a": ""}, {"a/b": "x"}, {"/a": ""}, {"a//b": ""}, {"./a": ""}, {"a/..": ""}, {"...": ""}, {".a/..b": ""},
              {"a\n": ""}, {"é" * 200: ""}, {"a": "x", "a/b": "y"}],
    "workdir": ["0" * 64, {"archive": "0" * 64}, {"archive": "0" * 63}, {}, ".", "0" * 64 + "\n", 1],
    "keep": ["0s", "366d", "367d", 0, -1, None],
    "checkpoint.interval": ["5s", "0s", "99ms", "100ms", "0.1s", 0, -1, "1h", "1.5h", "1h30m", "30m1h", "1h90m", "90",
                            "inf", 1e9, 1e400, "10d", "366d", "366d1s", "05s", "1.0001s", " 5s", "5s\n", None],
    "checkpoint.grace": ["0s", "10s", "60m", "61m", "59m59s", "1d", "0.041d", "0.042d", 0, 3600, 3600.5, None],
    "checkpoint.keep": [0, 1, 2, 100, 101, 1.0, None],
    "limits.max_runtime": ["1h", "0s", "999ms", 0, "400d", 1e12, None],
    "limits.retries": [0, -1, 1000, 1001, 1.0, None, True, "1", {}, {"exit": {"137": 2, "other": 1}, "lost": 5},
                       {"exit": {"0": 1}}, {"exit": {"255": "unlimited"}}, {"exit": {"256": 1}}, {"exit": {"1": "x"}},
                       {"exit": {"1\n": 1}}, {"preempted": "unlimited"}, {"preempted": -1}, {"lost": 1001}, {"x": 1}],
    "after": [[], ["a"], ["a:ended"], ["a:started", "a:failed"], ["a:ready"], ["a:"], ["A"], ["a\n"], "a", [1], [None],
              [{"workload": "a", "same_index": True}], [{"workload": "a", "same_index": 1}],
              [{"workload": "a"}], [{"workload": "a", "condition": "ended"}], [{"workload": "a", "condition": "done"}],
              [{"table": "a.b", "partition": "ds=1", "condition": "ready"}], [{"table": "a", "partition": "/"}],
              ["a"] * 100, ["a"] * 101, None],
    "not_before": ["2h", 0, -1, "366d", "367d", "2026-11-28T08:00:00+01:00", "2026-11-28T08:00Z", "2026-11-28T08:00",
                   "2026-11-28 08:00Z", "2026-13-01T00:00Z", "2026-11-28T24:00Z", "2026-11-28T08:00:00.5Z",
                   "1999-01-01T00:00Z", "2026-11-28T08:00Z\n", "", True, None],
    "notify": [[], [{"email": "a@b.c"}], [{"email": "a@b.c\r\nBcc: d@e.f"}], [{"email": "a b@c.d"}],
               [{"email": "a@b.c,d@e.f"}],
               [{"webhook": "https://a.b/c?d=e", "secret": "s"}], [{"webhook": "ftp://a.b", "secret": "s"}],
               [{"webhook": "https://a:1@b.c", "secret": "s"}], [{"webhook": "https://a.b:70000", "secret": "s"}],
               [{"webhook": "http://[::1]:80/", "secret": "s"}], [{"webhook": "https://a b", "secret": "s"}],
               [{"webhook": {"secret": "u"}, "secret": "s"}], [{"webhook": {}, "secret": "s"}],
               [{"webhook": "https://a.b"}], [{"email": "a@b.c", "on": ["failed", "failed"]}],
               [{"email": "a@b.c", "on": ["failed"]}], [{"email": "a@b.c", "on": []}],
               [{"email": "a@b.c", "on": ["ended"]}], [{"email": "a@b.c", "each": False}], ["a@b.c"], {}, None],
    "if_never": ["end", "keep", "END", "", None],
    "jobs.tasks": [0, -1, 1, 100000, 100001, 1.0, 1.5, True, "2", {"min": 2, "max": 16}, {"min": 2, "max": 2},
                   {"min": 0, "max": 2}, {"min": 1}, {"max": 2}, {"min": 1, "max": 100001}, {"min": 1.0, "max": 2.5},
                   {"min": 1, "max": 2, "x": 1}, {"min": None, "max": 2}, {}, None],
    "jobs.run": ["echo", "", "  ", "a\n", ["x"], [], [""], [" "], [1], [1.0], [1.5], ["x", ""], ["x", None], None],
    "jobs.setup": ["a", " ", ["a"], "x" * 98304, "x" * 98305, "é" * 98304, None],
    "jobs.restart": ["gang", "task", "none", True, None],
    "jobs.env": [{}, {"A": "b"}, {"A": 1}, {"A": 1.0}, {"A": 0.1}, {"A": 10**20}, {"1A": "x"}, {"MIZZEN_X": "y"},
                 {"RANK": "1"}, {"RANKS": "1"}, {"A\n": "x"}, {"A": True}, {"PATH": "x"}, {"A": None}, {"A": "\0"}],
    "jobs.resources.accelerators": [
        "a100", "a100:0", "a100:1", "a100:62", "a100:63", ":1", "a100:01", "a100:1.0", "A100:8", "a100:1\n", [],
        ["a100:1", "v100:2"], ["a100:1", "a100:1"], ["a100", "a100:1"], {"a100": 1}, 1, None],
    "jobs.resources.cpus": [0, 0.1, 0.0001, 1, "1", "500m", -1, 10_000, 10_001, None, True],
    "jobs.resources.memory": ["512MiB", "1GB", "0B", "1", "1.5GiB", "1KB", "1049KB", "1048.576KB", "1048575", "1048576",
                              1024, 1 << 20, 1.5, 0, -5, "1e3", "512 MiB", "512mib", "64TiB", "65TiB", None],
}  # fmt: skip


def with_value(key: str, value: Any) -> dict[str, Any]:
    """Returns the example of a workload with another value at a path; `jobs` is the only job."""
    section, _, name = key.rpartition(".")
    if section == "jobs":
        return document(jobs=[{**JOB, name: value}])
    if section == "jobs.resources":
        return resources(**{name: value})
    return {**EXAMPLE, section: {**EXAMPLE[section], name: value}} if section else {**EXAMPLE, name: value}


@pytest.mark.parametrize("key", VALUES)
def test_values_of_a_field(key: str) -> None:
    """For each value of the field of a workload, the schema and the API agree whether it is valid."""
    for value in VALUES[key]:
        check_equal(DOCUMENT, rules_of_workload, with_value(key, value))


RULES = [
    ("jobs of one name", document(jobs=[JOB, JOB])),
    ("too many tasks", document(jobs=[{**JOB, "tasks": 60_000}, {**JOB, "name": "b", "tasks": 60_000}])),
    ("fewer tasks at most", job(tasks={"min": 3, "max": 2})),
    ("an elastic job and another one", document(jobs=[{**JOB, "tasks": {"min": 1, "max": 2}}, {**JOB, "name": "b"}])),
    ("elastic slices", job(tasks={"min": 2, "max": 4}, topology={"slice": {"tasks": 2, "level": "rack"}})),
    ("different numbers of GPUs", resources(accelerators=["a100:1", "v100:2"])),
    ("a secret that is also a variable", job(env={"A": "b"}, secrets={"A": "b"})),
    ("a task with an image that restarts alone", job(image="a", restart="task")),
    ("a script with too many bytes", job(run="é" * 60_000)),
    ("a command that is too long together", job(run=["x" * 60_000, "y" * 60_000])),
    ("a folder that is a file", document(files={"a": "", "a/b": ""})),
    ("two tables with one variable", document(tables=["a.b", "a--b"])),
    ("a dependency on nothing", document(after=[{"condition": "ended"}])),
    ("a dependency on two things", document(after=[{"workload": "a", "table": "b", "partition": "c"}])),
    ("a table without a partition", document(after=[{"table": "a"}])),
    ("a workload that is ready", document(after=[{"workload": "a", "condition": "ready"}])),
    ("a partition that has ended", document(after=[{"table": "a", "partition": "b", "condition": "ended"}])),
    ("two receivers in one", document(notify=[{"email": "a@b.c", "webhook": "https://a.b", "secret": "s"}])),
    ("no receiver", document(notify=[{"on": ["failed"]}])),
    ("each element without an array", document(notify=[{"email": "a@b.c", "each": True}])),
    ("a day that its month does not have", document(not_before="2026-02-30T00:00Z")),
    ("half a surrogate pair", document(labels={"a": "\ud800"})),
]


@pytest.mark.parametrize("body", [body for _, body in RULES], ids=[name for name, _ in RULES])
def test_rules_between_values_are_in_descriptions(body: Any) -> None:
    """If a document breaks only a rule that JSON Schema cannot express, a description in the schema states the rule."""
    rules = rules_of_workload(body)
    assert rules and None not in rules
    check_equal(DOCUMENT, rules_of_workload, body)


SERVICES = [
    ("name in SkyPilot's form", {"name": "A.b_c"}),
    ("name that cannot be changed", {"name": "a b"}),
    ("CPUs as text", {"resources": {"cpus": "4+"}}),
    ("CPUs beyond bounds", {"resources": {"cpus": "10001"}}),
    ("memory in GiB", {"resources": {"memory": 65_536}}),
    ("memory between GiB and bytes", {"resources": {"memory": 70_000}}),
    ("memory as text", {"resources": {"memory": "64GiB+"}}),
    ("accelerators as mapping", {"resources": {"accelerators": {"A100": 8, "L4:4": None}}}),
    ("number twice", {"resources": {"accelerators": {"L4:4": 4}}}),
    ("port as text", {"resources": {"ports": ["80", 80.0]}}),
    ("port with zero", {"resources": {"ports": "080"}}),
    ("infra", {"resources": {"infra": "AWS/*/z"}}),
    ("long infra", {"resources": {"infra": "a/b/c/d"}}),
    ("ignored field", {"resources": {"disk_size": [1]}}),
    ("refused field without value", {"file_mounts": None}),
    ("refused field", {"file_mounts": {}}),
    ("variables that are numbers", {"envs": {"A": 0.5, "B": True}}),
    ("secret without value", {"secrets": {"A_B": None}}),
    ("secret without value or name", {"secrets": {"_": None}}),
    ("git", {"workdir": {"url": "x"}}),
    ("placer in any case", {"service": {"replica_policy": {"spot_placer": "SpotHedge"}}}),
    ("placer with the Kelvin sign", {"service": {"replica_policy": {"spot_placer": "dynamic_fallbac\u212a"}}}),
    ("probe as path", {"service": {"readiness_probe": "/a?b"}}),
    ("probe with a line end", {"service": {"readiness_probe": "/a\n"}}),
    ("header", {"service": {"readiness_probe": {"path": "/", "headers": {"A": 1, "content-LENGTH": "1"}}}}),
    ("body that is no JSON", {"service": {"readiness_probe": {"path": "/", "post_data": "{"}}}),
    ("most below least", {"service": {"replica_policy": {"min_replicas": 2, "max_replicas": 1}}}),
]  # fmt: skip


@pytest.mark.parametrize("changes", [changes for _, changes in SERVICES], ids=[name for name, _ in SERVICES])
@pytest.mark.parametrize("version", [1, None])
def test_service_documents(changes: dict[str, Any], version: int | None) -> None:
    """The schema and the API agree about a service document, in mizzen's form and in that of SkyPilot."""
    check_equal(SERVICE_DOCUMENT, rules_of_service, {**SERVICE_EXAMPLE, "version": version, **changes})


@pytest.mark.rotating
def test_generated_workloads() -> None:
    """The schema and the API agree about documents that are generated from the schema, and about damaged ones."""
    jsonschema.Draft202012Validator.check_schema(DOCUMENT)
    compare(DOCUMENT, rules_of_workload, [EXAMPLE], 7000)


@pytest.mark.rotating
def test_generated_services() -> None:
    """The schema and the API agree about documents that are generated from the schema, and about damaged ones."""
    compare(SERVICE_DOCUMENT, rules_of_service, [SERVICE_EXAMPLE], 6000)
