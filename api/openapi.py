"""Builds the OpenAPI description: adds problem documents to all operations and corrects FastAPI's error schemas."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.problems import MEDIA_TYPE, ProblemView

DESCRIPTION = """
Submit, monitor and control gang workloads, and inspect the fleet on which they run.

* Every error is a problem document (RFC 9457) with a stable `type`. If a request has several errors, `errors` lists all
  of them, each with its path.
* A key with a tenant can read and change only objects of that tenant. For objects of other tenants the response is 404.
* Each operation names the lowest role that it requires (balancer, viewer, submitter, operator) in its security
  requirement.
* Priority 1 is the highest and 7 the lowest. Times are ISO 8601 with a time zone, sizes are bytes, CPUs are cores.
"""
_TAGS = [
    {"name": "workloads", "description": "Submit, list, change"},
    {"name": "following", "description": "Events, logs, reasons and the queue"},
    {"name": "tenants", "description": "Tenants, their quotas and secrets, and API keys"},
    {"name": "services", "description": "Services: their documents, replicas and endpoints"},
    {"name": "fleet", "description": "Regions, clusters and machines"},
    {"name": "data", "description": "Tables, partitions, replicas, the jobs that read them, and uploaded archives"},
    {"name": "service", "description": "Health and metrics of the API process"},
]
_DESCRIPTIONS = {
    400: "The request is malformed",
    401: "No valid API key",
    403: "The key's role does not allow this",
    404: "The object does not exist, or it belongs to another tenant",
    408: "The request did not arrive in time",
    409: "The current state does not allow this",
    410: "The data was deleted after its retention time",
    413: "The body is too large",
    415: "The media type is not supported",
    422: "The request is not valid: `errors` lists all errors",
    429: "A limit of the key or the tenant is reached: `limit` names it, `Retry-After` says when to retry",
    503: "A part of the system does not respond; nothing was changed",
}
PROBLEM_REF = {"$ref": "#/components/schemas/Problem"}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the error responses of an operation, for `responses=`. `_describe` adds the common ones."""
    return {status: _refusal(status) for status in statuses}


def _refusal(status: int) -> dict[str, Any]:
    return {"description": _DESCRIPTIONS[status], "content": {MEDIA_TYPE: {"schema": PROBLEM_REF}}}


def install(app: FastAPI, components: dict[str, Any]) -> None:
    """Installs the OpenAPI description of `app`; `components` are schemas that operations refer to by name."""

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, components)
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]


def _describe(app: FastAPI, components: dict[str, Any]) -> dict[str, Any]:
    document = get_openapi(
        title="mizzen", version=app.version, description=DESCRIPTION, routes=app.routes, tags=_TAGS,
        openapi_version="3.1.0",
    )  # fmt: skip
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    problem = ProblemView.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(problem.pop("$defs", {}))
    schemas["Problem"] = problem
    schemas.update(components)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            if "422" in responses and MEDIA_TYPE not in responses["422"].get("content", {}):
                responses["422"] = _refusal(422)
            if path.startswith("/v1/"):
                for status in (400, 401, 403, 429, 503):
                    responses.setdefault(str(status), _refusal(status))
                if method in ("post", "put", "patch"):
                    responses.setdefault("408", _refusal(408))
                    responses.setdefault("413", _refusal(413))
                    responses.setdefault("415", _refusal(415))
            operation["responses"] = dict(sorted(responses.items()))
    return document
