"""Service documents in SkyPilot's form: its files are read, and fields that are not supported are named."""

import json
import re
import subprocess
from typing import Any

import jsonschema
import pytest

from api.documents.schema import SERVICE_DOCUMENT, SERVICE_EXAMPLE
from api.documents.service import read_service
from api.documents.skypilot import IGNORED, REFUSED
from api.documents.syntax import load_yaml
from domain.service import LoadBalancing, ReplicaPolicySpec, ResourceOption
from domain.serving_spec import ProbeSpec, ServingSpec
from domain.spec import ResourceSpec
from tests.api.service_documents import GIB, PAGE, read, spec_of
from tests.api.skypilot_files import HTTP_SERVER, LISTING_1, TGI, VLLM


def test_listing_of_the_paper() -> None:
    """Listing 1 is read unchanged; its name comes from the caller, because the listing has none."""
    draft = read(LISTING_1, "llm")
    assert draft.problems == [] and draft.notes == []
    spec = draft.spec()
    resources = ResourceSpec(gpus=1, gpu_types=("A100",))
    assert spec.options == (
        ResourceOption(resources=resources, spot=True, provider="aws", region="us-east-1"),
        ResourceOption(resources=resources, spot=True, provider="gcp"),
    )
    assert spec.policy == ReplicaPolicySpec(
        min_replicas=1,
        max_replicas=10,
        target_qps_per_replica=1,
        placer="spothedge",
        num_overprovision=2,
        dynamic_ondemand_fallback=True,
    )
    assert spec.serving == ServingSpec(port=8080, probe=ProbeSpec(path="/v1/chat/completions"))
    assert "python llm_server.py --port 8080" in str(spec.script)
    assert "pip install -r requirements.txt" in str(spec.setup)


def test_http_server_of_skypilot() -> None:
    """A fixed number of replicas needs no GPUs; a name with capitals and underscores is changed, with a note."""
    draft = read(HTTP_SERVER)
    assert draft.problems == []
    spec = draft.spec()
    assert spec.name == "http-server" and "http-server" in draft.notes[0]
    assert (spec.policy.min_replicas, spec.policy.max_replicas, spec.policy.target_qps_per_replica) == (2, 2, None)
    assert not spec.uses_spot and spec.options == (ResourceOption(resources=ResourceSpec(cpus_milli=2000)),)
    assert spec.serving.probe.path == "/health"


def test_vllm_of_skypilot() -> None:
    """Alternatives keep their order, the probe contains the values of variables, and notes name fields of the disk."""
    draft = read(VLLM)
    assert draft.problems == []
    spec = draft.spec()
    gpus = [(option.resources.gpu_types, option.resources.gpus) for option in spec.options]
    assert gpus == [(("L4", "A10g"), 8), (("A100",), 4), (("A100",), 8), (("A100-80GB",), 2)]
    assert {(o.resources.cpus_milli, o.resources.memory_bytes, o.spot) for o in spec.options} == {
        (32_000, 128 * GIB, True)
    }
    assert json.loads(str(spec.serving.probe.body)) == {
        "model": "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "messages": [{"role": "user", "content": "Hello! What is your name?"}],
        "max_tokens": 1,
    }
    assert spec.serving.probe.headers == {"Content-Type": "application/json"}
    assert spec.serving.probe.interval_s == 10 and spec.serving.probe.initial_delay_s == 1800
    assert spec.env == {
        "MODEL_NAME": "mistralai/Mixtral-8x7B-Instruct-v0.1", "MAX_LEN": "4096", "TEMPERATURE": "0.5",
    }  # fmt: skip
    assert spec.secrets == {"HF_TOKEN": "hf-token"}
    assert spec.balancing is LoadBalancing.LEAST_LOAD
    assert spec.policy.placer == "spothedge" and spec.policy.base_ondemand_fallback_replicas == 1
    assert (spec.policy.upscale_delay_s, spec.policy.downscale_delay_s) == (60, 600)
    assert [note.split()[0] for note in draft.notes] == ["resources.disk_size", "resources.disk_tier"]


def test_tgi_of_skypilot() -> None:
    """`ordered` and `infra` give alternatives in places; headers contain the values of variables."""
    draft = read(TGI, "tgi")
    assert draft.problems == []
    spec = draft.spec()
    assert spec.options == (
        ResourceOption(
            resources=ResourceSpec(gpus=1, gpu_types=("A100",), memory_bytes=64 * GIB), provider="aws",
            region="us-east-1",
        ),
        ResourceOption(
            resources=ResourceSpec(gpus=2, gpu_types=("L4",), memory_bytes=64 * GIB), region="us-west1",
            zone="us-west1-a",
        ),
    )  # fmt: skip
    assert spec.serving.port == 8082
    assert spec.serving.probe == ProbeSpec(path="/health", timeout_s=30, headers={"Authorization": "Bearer abc"})


def test_scripts_of_skypilot_run_in_bash_with_its_variables() -> None:
    """A script of a file without `version` runs in bash, goes on after errors, and has SkyPilot's variables."""
    run = """false; [[ -n "don't" ]] && echo "$UNSET$SKYPILOT_NODE_RANK/$SKYPILOT_NUM_NODES,$SKYPILOT_NODE_IPS"
echo "$SKYPILOT_NUM_GPUS_PER_NODE,$SKYPILOT_SERVE_REPLICA_ID" """
    spec = spec_of({"service": {}, "run": run})
    env = {"RANK": "1", "WORLD_SIZE": "2", "MIZZEN_TASK_ADDRS": "10.0.0.1\n10.0.0.2", "MIZZEN_WORKLOAD_NAME": "chat-7",
           "MIZZEN_WORKLOAD": "wl-1", "PATH": "/usr/bin:/bin"}  # fmt: skip
    for slots, gpus in (("0,3", 2), ("", 0)):
        done = subprocess.run(
            ["/bin/sh", "-eu", "-c", str(spec.script)],
            env={**env, "CUDA_VISIBLE_DEVICES": slots}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == f"1/2,10.0.0.1\n10.0.0.2\n{gpus},7\n"
    assert spec_of({"version": 1, "service": {}, "run": run}).script == run


@pytest.mark.parametrize(("section", "key"), [(s, k) for s, keys in REFUSED.items() for k in keys])
def test_unsupported_fields_are_refused_by_name(section: str, key: str) -> None:
    """Each unsupported field of SkyPilot is an error at its path, which says what to do instead."""
    draft = read_service(_with(section, key, {"a": "b"}), "vision")
    assert [problem.path for problem in draft.problems] == [f"{section}.{key}".lstrip(".")]
    assert draft.problems[0].message.startswith("is not supported: ")


@pytest.mark.parametrize(("section", "key"), [(s, k) for s, keys in IGNORED.items() for k in keys])
def test_fields_without_effect_are_noted(section: str, key: str) -> None:
    """Each field of SkyPilot that is accepted without effect is named in a note."""
    draft = read_service(_with(section, key, {"a": "b"}), "vision")
    assert draft.problems == []
    assert [note.split(" has no effect: ")[0] for note in draft.notes] == [f"{section}.{key}".lstrip(".")]


def _with(section: str, key: str, value: object) -> dict[str, Any]:
    """Returns the example with one more key in a section, such as `service.readiness_probe`."""
    body: dict[str, Any] = json.loads(json.dumps(SERVICE_EXAMPLE))
    target = body
    for part in section.split(".") if section else []:
        target = target.setdefault(part, {})
    target[key] = value
    return body


def test_unsupported_fields_are_documented() -> None:
    """The table of SkyPilot's fields in `docs/services.md` has every field that is refused or has no effect."""
    table = PAGE.read_text().partition("## SkyPilot's service files")[2].partition("### Scripts")[0]
    keys = {key for keys in (*REFUSED.values(), *IGNORED.values()) for key in keys}
    assert {key for key in keys if not re.search(rf"[`.]{key}`", table)} == set()


@pytest.mark.parametrize("text", [LISTING_1, HTTP_SERVER, VLLM, TGI])
def test_schema_accepts_documents(text: bytes) -> None:
    """The published schema accepts SkyPilot's files, apart from fields that have no effect."""
    value = load_yaml(text)
    for key in IGNORED["resources"]:
        value["resources"].pop(key, None)
    value.pop("name", None)  # the reader changes SkyPilot's names
    value["secrets"] = {"HF_TOKEN": "hf-token"}
    jsonschema.validate(value, SERVICE_DOCUMENT)
