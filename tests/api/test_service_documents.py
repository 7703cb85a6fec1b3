"""Service documents in mizzen's own form: parsing, normalisation, and an error for each mistake."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.documents.installation_checks import check_service, fleet
from api.documents.schema import SERVICE_DOCUMENT, SERVICE_EXAMPLE
from api.documents.service import SERVICE, read_service
from api.documents.syntax import load_json, load_yaml
from domain.service import ReplicaPolicySpec, ResourceOption, ServiceSpec
from domain.serving_spec import ProbeSpec, ServingSpec
from domain.spec import ResourceSpec
from infra.db.capacity import PoolRow
from tests.api.service_documents import GIB, PAGE, read, spec_of
from tests.api.world import ARCHIVE_SHA256, ApiWorld
from tests.depth import examples


def document(**sections: Any) -> dict[str, Any]:
    """Returns the example; a mapping changes some keys of a section, and None removes a key or a section."""
    body = dict(SERVICE_EXAMPLE)
    for key, value in sections.items():
        merged = {**body[key], **value} if isinstance(value, dict) and isinstance(body.get(key), dict) else value
        body[key] = {k: v for k, v in merged.items() if v is not None} if isinstance(merged, dict) else merged
    return {key: value for key, value in body.items() if value is not None}


def policy(**changes: Any) -> dict[str, Any]:
    """Returns the example with changes in its replica policy; None removes a key."""
    merged = {**SERVICE_EXAMPLE["service"]["replica_policy"], **changes}
    return document(service={"replica_policy": {k: v for k, v in merged.items() if v is not None}})


def probe(**changes: Any) -> dict[str, Any]:
    """Returns the example with changes in its probe."""
    return document(service={"readiness_probe": {**SERVICE_EXAMPLE["service"]["readiness_probe"], **changes}})


def test_example_becomes_this_specification() -> None:
    """Reading the example normalises its durations, sizes, alternatives and counts."""
    assert spec_of(SERVICE_EXAMPLE) == ServiceSpec(
        name="chat",
        tenant="vision",
        options=(
            ResourceOption(
                resources=ResourceSpec(
                    gpus=1, gpu_types=("a100", "v100"), cpus_milli=4000, memory_bytes=32 * GIB
                ),
                spot=True,
            ),
        ),
        argv=("python3", "serve.py", "--port", "8080"),
        env={"MODEL": "small"},
        secrets={"HF_TOKEN": "hf-token"},
        serving=ServingSpec(port=8080, probe=ProbeSpec(path="/v1/models", initial_delay_s=600), drain_s=60),
        policy=ReplicaPolicySpec(
            min_replicas=2,
            max_replicas=8,
            target_qps_per_replica=4,
            placer="spothedge",
            num_overprovision=1,
            dynamic_ondemand_fallback=True,
        ),
    )  # fmt: skip


def test_smallest_document_has_the_documented_defaults() -> None:
    """A document needs only a name, a command and an empty section `service`, if the key has a tenant."""
    draft = read(b"version: 1\nname: chat\nservice: {}\nrun: serve")
    assert draft.problems == []
    assert draft.spec() == ServiceSpec(name="chat", tenant="vision", script="serve")


SYNONYMS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("CPUs as text", document(resources={"cpus": "4+"}), "options.0.resources.cpus_milli", 4000),
    ("memory in GiB", document(resources={"memory": 16}), "options.0.resources.memory_bytes", 16 * GIB),
    ("memory as text in GiB", document(resources={"memory": "0.5+"}), "options.0.resources.memory_bytes", GIB // 2),
    ("memory with a unit", document(resources={"memory": "32GB+"}), "options.0.resources.memory_bytes", 32 * 10**9),
    ("memory in bytes", document(resources={"memory": 1 << 30}), "options.0.resources.memory_bytes", GIB),
    ("accelerators as mapping", document(resources={"accelerators": {"A100": 2}}), "options.0.resources.gpus", 2),
    ("port as text", document(resources={"ports": "80"}), "serving.port", 80),
    ("port as list", document(resources={"ports": [80]}), "serving.port", 80),
    ("port of the service", document(resources={"ports": None}, service={"ports": 80}), "serving.port", 80),
    ("two equal ports", document(service={"ports": 8080}), "serving.port", 8080),
    ("no port", document(resources={"ports": None}), "serving.port", None),
    ("num_nodes", document(num_nodes=2), "machines", 2),
    ("machines", document(machines=2), "machines", 2),
    ("cloud", document(resources={"cloud": "AWS"}), "options.0.provider", "aws"),
    ("provider", document(resources={"provider": "sim"}), "options.0.provider", "sim"),
    ("any infra", document(resources={"infra": "*"}), "options.0.provider", None),
    ("priority", document(priority=5), "level", 5),
    ("default placer", document(), "policy.placer", "spothedge"),
    ("capital letters", policy(spot_placer="SpotHedge"), "policy.placer", "spothedge"),
    ("learning placer", policy(spot_placer="SpotHedge+", num_overprovision=None), "policy.placer", "spothedge+"),
    ("load", policy(target_qps_per_replica=None, target_load_per_replica=150), "policy.target_load_per_replica", 150.0),
    ("outage price", policy(spot_placer="spothedge+", num_overprovision=None, outage_price_seconds="32m"),
     "policy.outage_price_s", 1920.0),
    ("placer alone", document(resources={"use_spot": None}, service={"replica_policy": {"spot_placer": "spothedge"}}),
     "options.0.spot", True),
    ("on-demand only", document(resources={"use_spot": None}, service={"replica_policy": None}), "policy.placer", None),
    ("no replicas while idle", policy(min_replicas=0), "policy.min_replicas", 0),
    ("fixed by equal limits", policy(max_replicas=2, target_qps_per_replica=None), "policy.max_replicas", 2),
    ("probe as path", document(service={"readiness_probe": "/up?deep=1"}), "serving.probe.path", "/up?deep=1"),
    ("probe by default", document(service={"readiness_probe": None}), "serving.probe.path", "/"),
    ("probe with JSON as text", probe(post_data='{"a": 1}'), "serving.probe.body", '{"a": 1}'),
    ("probe with an empty body", probe(post_data={}), "serving.probe.body", "{}"),
    ("probe with a form", probe(post_data="a=1", headers={"content-type": "application/x-www-form-urlencoded"}),
     "serving.probe.body", "a=1"),
    ("probe with failures", probe(failures=5), "serving.probe.failures", 5),
    ("other variables", probe(path="/$OTHER"), "serving.probe.path", "/$OTHER"),
    ("secret in a header", probe(headers={"Key": "$HF_TOKEN $MODEL"}), "serving.probe.headers.Key", "$HF_TOKEN small"),
    ("secrets of headers", probe(headers={"Key": "${HF_TOKEN}"}), "serving.probe.secrets", ["HF_TOKEN"]),
    ("duration with unit", document(service={"drain_seconds": "2m"}), "serving.drain_s", 120.0),
    ("no drain", document(service={"drain_seconds": 0}), "serving.drain_s", 0.0),
    ("timeout", document(service={"request_timeout_seconds": 60}), "request_timeout_s", 60.0),
    ("timeout of SkyPilot", document(service={"load_balancer": {"stream_timeout_seconds": 60}}), "request_timeout_s",
     60.0),
    ("first byte", document(service={"first_byte_seconds": 2}), "first_byte_s", 2.0),
    ("hold", document(service={"hold_seconds": "2m"}), "hold_s", 120.0),
    ("balancing of SkyPilot", document(service={"load_balancing_policy": "instance_aware_least_load"}), "balancing",
     "least_connections"),
    ("targets by type", policy(target_qps_per_replica={"A100": 3, "v100:1": 1, "t4": 9}), "policy.target_qps_by_gpu",
     {"a100": 3.0, "v100:1": 1.0, "t4": 9.0}),
    ("ongoing", document(service={"replica_policy": {"max_replicas": 3, "target_ongoing_requests": 4}}),
     "policy.target_ongoing_requests", 4.0),
    ("no queue", document(service={"max_queue": 0}), "max_queue", 0),
    ("surge", document(service={"max_surge": 3}), "max_surge", 3),
    ("no surge", document(service={"max_surge": 0, "max_unavailable": 1}), "max_surge", 0),
    ("unavailable", document(service={"max_unavailable": 2}), "max_unavailable", 2),
    ("canary", document(service={"update": {"canary": "12.5%", "for": "5m", "abort_if": {"error_rate": "0%"}}}),
     "canary", {"share": 0.125, "for_s": 300.0, "error_rate": 0.0, "p90_s": None}),
    ("canary's limit of time", document(service={"update": {"canary": "10%", "abort_if": {"p90_ms": 500}}}),
     "canary", {"share": 0.1, "for_s": 600.0, "error_rate": None, "p90_s": 0.5}),
    ("default spread", document(), "spread", {"over": "machine", "required": False}),
    ("spread", document(service={"spread": "zone, preferred"}), "spread", {"over": "zone", "required": False}),
    ("required spread", document(service={"spread": "machine, required"}), "spread",
     {"over": "machine", "required": True}),
    ("no spread", document(service={"spread": "none"}), "spread", {"over": None, "required": False}),
    ("retries", document(service={"retry_non_idempotent": True}), "retry_non_idempotent", True),
    ("balancing", document(service={"load_balancing_policy": "Round_Robin"}), "balancing", "round_robin"),
    ("sticky by header", document(service={"load_balancing": {"sticky": {"header": "X-Session"}}}), "sticky",
     {"header": "X-Session", "prefix_bytes": None}),
    ("sticky by prefix", document(service={"load_balancing": {"sticky": {"prefix_bytes": 1024}}}),
     "sticky.prefix_bytes", 1024),
    ("not sticky", document(service={"load_balancing": {}}), "sticky", None),
    ("resume", document(service={"load_balancing": {"resume": "header"}}), "resume", True),
    ("null is as if left out", document() | {"file_mounts": None, "labels": None}, "labels", {}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "path", "value"), [s[1:] for s in SYNONYMS], ids=[s[0] for s in SYNONYMS])
def test_fields_and_their_synonyms(body: dict[str, Any], path: str, value: object) -> None:
    """Each form of a field becomes the same field of the specification."""
    found: Any = spec_of(body).model_dump(mode="json")
    for key in path.split("."):
        found = found[int(key)] if isinstance(found, list) else found[key]
    assert found == value


WRONG: list[tuple[str, object, str, str]] = [
    ("no mapping", [1], "", "must be a mapping"),
    ("nothing", None, "", "empty"),
    ("unknown key", document(resorces={}), "resorces", "did you mean resources?"),
    ("unknown key of the service", document(service={"replica": 1}), "service.replica", "did you mean replicas?"),
    ("another version", document(version=2), "version", "must be 1"),
    ("name with capitals in our form", document(name="Chat"), "name", "lower-case letters"),
    ("name that cannot be changed", document(version=None, name="a b"), "name", "lower-case letters"),
    ("no command", document(run=None), "run", "missing"),
    ("no section for the service", document(service=None), "service", "missing"),
    ("two commands", document(resources={"run": "x"}), "resources.run", "also given at the top level"),
    ("both spellings", document(envs={"A": "1"}), "envs", "means the same as env"),
    ("variable without value", document(env=None) | {"envs": {"A": None}}, "envs.A", "it is empty"),
    ("a secret's value", document(secrets={"HF_TOKEN": "hf_SECRET"}), "secrets.HF_TOKEN", "must be the name of one"),
    ("priority out of bounds", document(priority=8), "priority", "from 1 to 7"),
    ("label as boolean", document(labels={"a": True}), "labels.a", "put it in quotes"),
    ("no machines", document(machines=0), "machines", "from 1 to 1000"),
    ("workdir as path", document(workdir="."), "workdir", "use `mizzen serve up`"),
    ("workdir in git", document(workdir={"url": "https://x"}), "workdir", "the API clones no repository"),
    ("two ports", document(service={"ports": 80}), "service.ports", "resources.ports is 8080"),
    ("a list of two ports", document(resources={"ports": [80, 81]}), "resources.ports[1]", "a replica has one port"),
    ("range of ports", document(resources={"ports": "80-90"}), "resources.ports", "ranges are not supported"),
    ("port 0", document(resources={"ports": 0}), "resources.ports", "from 1 to 65535"),
    ("port beyond 16 bits", document(service={"ports": 65536}), "service.ports", "from 1 to 65535"),
    ("long port", document(resources={"ports": "0000000080800"}), "resources.ports", "from 1 to 65535"),
    ("port as boolean", document(resources={"ports": True}), "resources.ports", "from 1 to 65535"),
    ("CPUs without sense", document(resources={"cpus": "many"}), "resources.cpus", "4+"),
    ("memory by CPU", document(resources={"memory": "4x"}), "resources.memory", "multiples of the CPUs"),
    ("memory without sense", document(resources={"memory": "lots"}), "resources.memory", "512MiB"),
    ("fraction of a GPU", document(resources={"accelerators": {"A100": 0.5}}), "resources.accelerators.A100", "whole"),
    ("a type twice", document(resources={"accelerators": ["a:1", "a"]}), "resources.accelerators[1]", "twice"),
    ("spot as text", document(resources={"use_spot": "yes"}), "resources.use_spot", "true or false"),
    ("spot in one alternative", document(resources={"any_of": [{"use_spot": False}, {}]}), "resources.use_spot",
     "same in all alternatives"),
    ("no alternative", document(resources={"any_of": []}), "resources.any_of", "at least one"),
    ("two lists", document(resources={"any_of": [{}], "ordered": [{}]}), "resources.ordered", "means the same"),
    ("alternatives in an alternative", document(resources={"any_of": [{"any_of": [{}]}]}), "resources.any_of[0].any_of",
     "unknown key"),
    ("too many alternatives", document(resources={"accelerators": [f"a:{i}" for i in (1, 2)] , "any_of": [{}] * 33}),
     "resources", "at most 64 alternatives"),
    ("region twice", document(resources={"infra": "aws", "region": "r"}), "resources.region", "part of infra"),
    ("long infra", document(resources={"infra": "a/b/c/d"}), "resources.infra", "provider/region/zone"),
    ("provider's name", document(resources={"provider": "a b"}), "resources.provider", "must be a name"),
    ("path without slash", document(service={"readiness_probe": "health"}), "service.readiness_probe", "begin with /"),
    ("path with a space", probe(path="/a b"), "service.readiness_probe.path", "without spaces"),
    ("path with a line end", probe(path="/a\r\nX: y"), "service.readiness_probe.path", "begin with /"),
    ("probe without path", document(service={"readiness_probe": {"timeout_seconds": 1}}),
     "service.readiness_probe.path", "missing"),
    ("body that is no JSON", probe(post_data="{"), "service.readiness_probe.post_data", "JSON"),
    ("body as number", probe(post_data=1), "service.readiness_probe.post_data", "JSON"),
    ("large body", probe(post_data={"a": "x" * 70_000}), "service.readiness_probe.post_data", "at most 65536 bytes"),
    ("infinite body", probe(post_data={"a": float("inf")}), "service.readiness_probe.post_data", "finite"),
    ("header's name", probe(headers={"A B": "1"}), "service.readiness_probe.headers.'A B'", "letters, digits"),
    ("header with a line end", probe(headers={"A": "1\r\nB: 2"}), "service.readiness_probe.headers.A", "printable"),
    ("own header", probe(headers={"Content-Length": "1"}), "service.readiness_probe.headers.Content-Length", "omit it"),
    ("secret in a path", probe(path="/?key=${HF_TOKEN}"), "service.readiness_probe", "only headers can refer"),
    ("secret in a body", probe(post_data={"key": "$HF_TOKEN"}), "service.readiness_probe", "only headers can refer"),
    ("no time", probe(timeout_seconds=0), "service.readiness_probe.timeout_seconds", "from 0.1"),
    ("no failures", probe(failures=0), "service.readiness_probe.failures", "from 1"),
    ("two numbers of replicas", document(service={"replicas": 2}), "service.replicas", "omit replica_policy"),
    ("no replicas", document(service={"replica_policy": None, "replicas": 0}), "service.replicas", "from 1"),
    ("least above most", policy(min_replicas=9), "service.replica_policy.max_replicas", "at least min_replicas"),
    ("no target", policy(target_qps_per_replica=None), "service.replica_policy.target_qps_per_replica", "missing"),
    ("no most", policy(min_replicas=11, max_replicas=None), "service.replica_policy.max_replicas", "missing"),
    ("fixed at none", policy(min_replicas=0, max_replicas=None, target_qps_per_replica=None),
     "service.replica_policy.min_replicas", "at least 1 without"),
    ("target of 0", policy(target_qps_per_replica=0), "service.replica_policy.target_qps_per_replica", "from 1e-06"),
    ("no target of a type", policy(target_qps_per_replica={"A100": 1, "v100:2": 1}),
     "service.replica_policy.target_qps_per_replica", "has no value for v100:1"),
    ("no targets", policy(target_qps_per_replica={}), "service.replica_policy.target_qps_per_replica",
     "has no value for a100:1"),
    ("two targets of a type", policy(target_qps_per_replica={"A100": 1, "a100": 1, "v100": 1}),
     "service.replica_policy.target_qps_per_replica.a100", "given twice"),
    ("target of a type as text", policy(target_qps_per_replica={"a100": "1", "v100": 1}),
     "service.replica_policy.target_qps_per_replica.a100", "must be a number"),
    ("targets without accelerators", document(resources={"accelerators": None}, service={"replica_policy":
     {"max_replicas": 2, "target_qps_per_replica": {"a100": 1}}}), "service.replica_policy.target_qps_per_replica",
     "without accelerators"),
    ("negative delay", policy(upscale_delay_seconds=-1), "service.replica_policy.upscale_delay_seconds", "from 0"),
    ("unknown placer", policy(spot_placer="spothege"), "service.replica_policy.spot_placer", "must be one of"),
    ("negative overprovision", policy(num_overprovision=-1), "service.replica_policy.num_overprovision", "from 0"),
    ("overprovision of a placer that chooses it", policy(spot_placer="spothedge+"),
     "service.replica_policy.num_overprovision", "chooses the number itself"),
    ("load of a fixed number", policy(target_load_per_replica=1, min_replicas=2, max_replicas=2),
     "service.replica_policy.target_load_per_replica", "no effect with a fixed number"),
    ("load of nothing", policy(target_load_per_replica=0), "service.replica_policy.target_load_per_replica",
     "from 1e-06"),
    ("outage price of another placer", policy(outage_price_seconds=100),
     "service.replica_policy.outage_price_seconds", "only for spot_placer: spothedge+"),
    ("outage price without spot", document(resources={"use_spot": False}, service={"replica_policy":
     {"outage_price_seconds": 0}}), "service.replica_policy.outage_price_seconds", "use_spot: true"),
    ("placer of replays", policy(spot_placer="spot-only"), "service.replica_policy.spot_placer", "must be one of"),
    ("base above most", policy(base_ondemand_fallback_replicas=9),
     "service.replica_policy.base_ondemand_fallback_replicas", "at most max_replicas, which is 8"),
    ("placer without spot", document(resources={"use_spot": False}, service={"replica_policy": {"spot_placer":
     "spothedge"}}), "service.replica_policy.spot_placer", "use_spot: true"),
    ("base without spot", document(resources={"use_spot": None}, service={"replica_policy":
     {"base_ondemand_fallback_replicas": 1}}), "service.replica_policy.base_ondemand_fallback_replicas", "use_spot"),
    ("unknown balancing", document(service={"load_balancing_policy": "random"}),
     "service.load_balancing_policy", "must be one of round_robin, least_connections, least_load"),
    ("negative drain", document(service={"drain_seconds": -1}), "service.drain_seconds", "from 0"),
    ("two timeouts", document(service={"request_timeout_seconds": 1, "load_balancer": {"stream_timeout_seconds": 1}}),
     "service.load_balancer.stream_timeout_seconds", "means the same"),
    ("queue beyond bounds", document(service={"max_queue": 10**6}), "service.max_queue", "from 0 to 100000"),
    ("no surge", document(service={"max_surge": 0}), "service.max_surge", "at least 1 if max_unavailable is 0"),
    ("canary without share", document(service={"update": {"abort_if": {"p90_ms": 500}}}),
     "service.update.canary", "missing: the share"),
    ("canary of a number", document(service={"update": {"canary": 10, "abort_if": {"p90_ms": 500}}}),
     "service.update.canary", "must be a percentage such as 5%"),
    ("canary of everything", document(service={"update": {"canary": "100%", "abort_if": {"p90_ms": 500}}}),
     "service.update.canary", "from 0.1% to 99%"),
    ("canary without limits", document(service={"update": {"canary": "10%"}}),
     "service.update.abort_if", "missing: the limits"),
    ("canary with empty limits", document(service={"update": {"canary": "10%", "abort_if": {}}}),
     "service.update.abort_if", "must have error_rate, p90_ms or both"),
    ("canary with a wrong rate",
     document(service={"update": {"canary": "10%", "abort_if": {"error_rate": "x"}}}),
     "service.update.abort_if.error_rate", "from 0% to 99%"),
    ("canary for too long",
     document(service={"update": {"canary": "10%", "for": "13h", "abort_if": {"p90_ms": 500}}}),
     "service.update.for", "from 1 to 43200 seconds"),
    ("canary without room", document(service={"update": {"canary": "10%", "abort_if": {"p90_ms": 500}},
                                              "max_surge": 0, "max_unavailable": 1}),
     "service.max_surge", "must be at least 1 with update"),
    ("shadow", document(service={"update": {"canary": "10%", "abort_if": {"p90_ms": 500}, "shadow": "10%"}}),
     "service.update.shadow", "is not supported: HAProxy cannot send a request to two replicas"),
    ("no key", document(service={"load_balancing": {"sticky": {}}}), "service.load_balancing.sticky.header", "missing"),
    ("two keys", document(service={"load_balancing": {"sticky": {"header": "A", "prefix_bytes": 256}}}),
     "service.load_balancing.sticky.prefix_bytes", "omit header"),
    ("prefix of another size", document(service={"load_balancing": {"sticky": {"prefix_bytes": 1000}}}),
     "service.load_balancing.sticky.prefix_bytes", "must be one of 256, 1024, 4096"),
    ("header with a space", document(service={"load_balancing": {"sticky": {"header": "A B"}}}),
     "service.load_balancing.sticky.header", "letters, digits"),
    ("resume by other means", document(service={"load_balancing": {"resume": "body"}}), "service.load_balancing.resume",
     "must be one of header"),
    ("unknown key of balancing", document(service={"load_balancing": {"stick": {}}}), "service.load_balancing.stick",
     "did you mean sticky?"),
    ("negative surge", document(service={"max_surge": -1}), "service.max_surge", "from 0"),
    ("unknown spread", document(service={"spread": "racks"}), "service.spread", "must be one of none, machine"),
    ("spread of no text", document(service={"spread": {"zone": "required"}}), "service.spread", "must be"),
    ("required spread on spot", document(service={"spread": "zone, required"}, resources={"use_spot": True}),
     "service.spread", "must be preferred"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "path", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_form(body: object, path: str, message: str) -> None:
    """A document with an invalid form is exactly one error, with the path and what would be valid."""
    draft = read_service(body, "vision")
    assert [problem.path for problem in draft.problems] == [path]
    assert message in draft.problems[0].message


def test_a_secret_is_not_repeated() -> None:
    """If a document contains a secret's value instead of its name, the error does not contain the value."""
    draft = read_service(document(secrets={"HF_TOKEN": "hf_SECRET"}), "vision")
    assert "hf_SECRET" not in json.dumps([problem.to_json() for problem in draft.problems])


def test_documented_example_is_valid() -> None:
    """The document in `docs/services.md` is read without errors and without notes."""
    draft = read_service(load_yaml(PAGE.read_text().partition("```yaml\n")[2].partition("```")[0].encode()), None)
    assert draft.problems == [] and draft.notes == []
    assert json.loads(str(draft.spec().serving.probe.body))["model"] == "small"


def test_every_problem_at_once() -> None:
    """One reading finds all problems in all sections, also keys that are given twice."""
    text = b"""{"name": "A", "run": "", "resources": {"cpus": 0, "use_spot": true, "any_of": [{"zone": 1}]},
    "service": {"replica_policy": {"min_replicas": -1}, "pool": true, "readiness_probe": {"path": "/", "path": "/a"}},
    "envs": {"1A": "x", "B": "1", "B": "2"}, "version": 1}"""
    draft = read_service(load_json(text), None)
    assert {problem.path for problem in draft.problems} == {
        "name", "run", "tenant", "resources.cpus", "resources.any_of[0].zone", "service.pool", "envs.1A", "envs.B",
        "service.replica_policy.min_replicas", "service.readiness_probe.path",
    }  # fmt: skip


def test_names_are_checked_against_the_installation(shared_world: ApiWorld) -> None:
    """Unknown tenants, secrets and archives are errors, as for workloads; GPU types get the fleet's spelling."""
    with shared_world.session() as session:
        good = document(workdir=ARCHIVE_SHA256, resources={"accelerators": ["A100:8", "H100:8"]})
        draft = read_service(good, None)
        check_service(session, draft, None, fleet(session))
        assert draft.problems == []
        assert draft.spec().options[0].resources.gpu_types == ("a100", "H100")
        wrong = document(priority=1, workdir="0" * 64, secrets={"HF_TOKEN": "hf-tokn"})
        draft = read_service(wrong, None)
        check_service(session, draft, None, fleet(session))
        assert {problem.path for problem in draft.problems} == {"priority", "workdir", "secrets.HF_TOKEN"}
        draft = read_service(document(), None)
        check_service(session, draft, "speech", fleet(session))
        assert [problem.path for problem in draft.problems] == ["tenant"]


@pytest.mark.parametrize(
    ("resources", "is_refused"),
    [
        ({"accelerators": "v100:5"}, True),
        ({"accelerators": "h100:1"}, True),
        ({"accelerators": "v100:4"}, False),
        ({"accelerators": "v100:4", "region": "north"}, True),
        ({"any_of": [{"accelerators": "h100:1"}, {"accelerators": "a100:8"}]}, False),
        ({"cpus": 65}, True),
        ({"accelerators": "h100:1", "zone": "z"}, False),
        ({"accelerators": "h100:1", "use_spot": True}, False),
    ],
)
def test_what_no_machine_can_hold_is_refused(
    shared_world: ApiWorld, resources: dict[str, Any], is_refused: bool
) -> None:
    """As for workloads; but not where a provider or a pool may launch the machine."""
    body = {"version": 1, "name": "s", "tenant": "vision", "service": {"replicas": 1}, "run": "serve"}
    for has_pool in (False, True):
        with shared_world.session() as session:
            if has_pool:
                session.add(PoolRow(region="north", name="p", size=0))
                session.flush()
            draft = read_service({**body, "resources": resources}, None)
            check_service(session, draft, None, fleet(session))
            session.rollback()
        expected = ["resources"] if is_refused and not has_pool else []
        assert [problem.path for problem in draft.problems] == expected
        assert all("no machine can hold a replica; there are machines with" in one.message for one in draft.problems)


def test_schema_accepts_the_example() -> None:
    """The published schema is a valid schema, and accepts the example."""
    jsonschema.Draft202012Validator.check_schema(SERVICE_DOCUMENT)
    jsonschema.validate(SERVICE_EXAMPLE, SERVICE_DOCUMENT)


_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from(["A100:8", "1h", "2GiB", "4+", "/", "$MODEL", "*", "aws/r", "\0", "\ud800", "9" * 400]),
)  # fmt: skip
_PARTS = ("service", "resources", "readiness_probe", "replica_policy")
_WORDS = sorted(
    {*SERVICE.schema["properties"], *SERVICE_EXAMPLE["service"], *SERVICE_EXAMPLE["resources"],
     *SERVICE_EXAMPLE["service"]["replica_policy"], "path", "post_data",
     "headers", "any_of", "infra", "cloud", "spot_placer", "base_ondemand_fallback_replicas", "replicas", "num_nodes"}
)  # fmt: skip
_FIELDS = st.one_of(st.text(max_size=10), st.sampled_from(_WORDS))
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_FIELDS, inner, max_size=5)),
    max_leaves=20,
)


@settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
@given(tree=_TREES, changes=st.lists(st.tuples(st.sampled_from(["", *_PARTS]), _FIELDS, _TREES), max_size=3))
def test_any_tree_is_read_or_refused(tree: Any, changes: list[tuple[str, str, Any]]) -> None:
    """Reading any tree gives a specification that survives storage, or problems with messages."""
    body: dict[str, Any] = json.loads(json.dumps(SERVICE_EXAMPLE))
    sections = {"": body, "service": body["service"], "resources": body["resources"],
                **{key: body["service"][key] for key in _PARTS[2:]}}  # fmt: skip
    for section, key, value in changes:
        sections[section][key] = value
    for value in (tree, body):
        draft = read_service(value, "vision", "chat")
        if draft.problems:
            for problem in draft.problems:
                assert problem.message
                json.dumps(problem.to_json(), allow_nan=False).encode()
        else:
            spec = draft.spec()
            assert ServiceSpec.model_validate_json(spec.model_dump_json()) == spec
            assert 0 <= spec.policy.min_replicas <= spec.policy.max_replicas
            assert spec.uses_spot == all(option.spot for option in spec.options)
