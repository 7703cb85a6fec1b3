"""Generated requests: every response conforms to the OpenAPI document, and there are no internal errors."""

import asyncio
import json
from copy import deepcopy
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.documents.document_of import document_of
from api.documents.position import At
from api.documents.schema import EXAMPLE
from api.documents.syntax import Malformed, load_json, load_yaml
from api.documents.workload import read_workload
from domain import phases
from tests.api.world import ARCHIVE_SHA256, INSTANCE, ApiWorld, as_yaml, openapi_document
from tests.depth import examples

SEEDED = settings(
    max_examples=examples(15), derandomize=True, deadline=None, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@schemathesis.serializer("application/gzip")
def _gzip(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


def _operations() -> list[Any]:
    schema = schemathesis.openapi.from_dict(deepcopy(openapi_document()))
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    return [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]


def _id(operation: Any) -> str:
    return f"{operation.method.upper()} {operation.path}"


def _real(world: ApiWorld, path: str) -> dict[str, str]:
    """Returns values of path parameters that exist."""
    name = {"/v1/tables": "digits", "/v1/regions": "north"}.get("/".join(path.split("/")[:3]), "vision")
    chosen = f"wl-{1 + world.counter % len(phases.Phase):016d}"
    return {
        "id": "key-speech" if path.startswith("/v1/keys") else chosen, "name": name, "secret": "hf-token",
        "region": "north", "cluster": "alpha", "machine": "m1", "datacenter": "dc1", "placement_run": "placement-run-1",
        "sha256": ARCHIVE_SHA256, "instance": INSTANCE,
    }  # fmt: skip


@pytest.fixture(scope="module")
def peopled(shared_world: ApiWorld) -> ApiWorld:
    """Returns a world with a workload in each phase and an instance."""
    for phase in phases.Phase:
        id_ = shared_world.add_workload(phase)
        if phase in phases.PLACED_PHASES:
            shared_world.add_attempt(id_, 1, "north/alpha/m2", 1 << shared_world.counter % 8)
    shared_world.add_instance()
    return shared_world


@pytest.mark.rotating
@pytest.mark.parametrize("operation", _operations(), ids=_id)
def test_generated_requests(peopled: ApiWorld, operation: Any) -> None:
    """Responses to valid and invalid requests conform to the OpenAPI document; there are no internal errors."""

    async def answer(case: Any) -> None:
        request = case.as_transport_kwargs(base_url="http://api")
        request.pop("cookies", None)  # the API has none
        request["content"] = request.pop("data", None)
        request["headers"] = {**dict(request.get("headers") or {}), **peopled.headers("operator")}
        if operation.path.endswith(("/events", "/logs")):
            request["params"] = {**(request.get("params") or {}), "follow": "false"}
        transport = httpx.ASGITransport(peopled.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            found = await client.request(**request)
        if found.status_code >= 500:  # these tests run without a scheduler
            assert found.json()["type"] == "urn:mizzen:problem:scheduler-unavailable"
        case.validate_response(found, checks=CHECKS)

    @SEEDED
    @given(case=operation.as_strategy(), real=st.booleans())
    def run(case: Any, real: bool) -> None:
        if real and case.path_parameters:
            peopled.counter += 1
            values = _real(peopled, operation.path)
            case.path_parameters.update({name: values[name] for name in case.path_parameters})
        asyncio.run(answer(case))

    run()


_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from(["a100:8", "1h", "2GiB", "no", "0x", "\0", "\ud800", "9" * 400]),
)  # fmt: skip
_KEYS = st.one_of(
    st.text(max_size=10), st.sampled_from(sorted({*EXAMPLE, *EXAMPLE["jobs"][0], "accelerators", "archive"}))
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_KEYS, inner, max_size=5)),
    max_leaves=20,
)


@settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
@given(tree=_TREES, changes=st.dictionaries(_KEYS, _TREES, max_size=4), job=st.dictionaries(_KEYS, _TREES, max_size=4))
def test_any_tree_is_read_or_refused(tree: Any, changes: Any, job: Any) -> None:
    """Reading any tree gives a specification, or problems with messages."""
    for value in (tree, {**EXAMPLE, **changes, "jobs": [{**EXAMPLE["jobs"][0], **job}]}):
        draft = read_workload(value, "vision")
        if draft.problems:
            for problem in draft.problems:
                assert problem.message
                json.dumps(problem.to_json(), allow_nan=False).encode()
        else:
            spec = draft.spec()
            spec.model_dump_json()
            again = read_workload(json.loads(json.dumps(document_of(spec))), None)
            assert not again.problems and again.spec() == spec


@settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
@given(body=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass"))))
def test_any_bytes_are_loaded_or_malformed(body: bytes) -> None:
    """Loading any bytes gives a value or raises Malformed with a message."""
    for load in (load_yaml, load_json):
        try:
            load(body)
        except Malformed as error:
            assert str(error)


@settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
@given(at=st.integers(0, 400), insert=st.text(alphabet="{}[]:,-'\"&*!|>%@`#\n\t ?x0", max_size=6))
def test_damaged_documents_are_loaded_or_malformed(at: int, insert: str) -> None:
    """Loading a document with a few inserted characters gives a value or raises Malformed, in YAML and in JSON."""
    for text, load in ((as_yaml(EXAMPLE).decode(), load_yaml), (json.dumps(EXAMPLE), load_json)):
        try:
            At("", load((text[:at] + insert + text[at:]).encode())).section(("name",))
        except Malformed as error:
            assert str(error)
