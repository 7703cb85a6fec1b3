"""`mizzen json-schema`: the JSON Schemas of the documents that an installation reads."""

import json
from collections.abc import Mapping
from typing import Any

from api.documents import schema
from domain.documents import json_schema
from infra.stack.fleet import Fleet
from tetris.documents import instance_schema


def schema_of(kind: str) -> str:
    """Returns the JSON Schema of a kind of document as JSON."""
    schemas: dict[str, Any] = {
        "workload": schema.DOCUMENT,
        "service": schema.SERVICE_DOCUMENT,
        "fleet": json_schema(Fleet),
        "instance": instance_schema(),
    }
    return printed(schemas[kind])


def printed(schema: Mapping[str, Any]) -> str:
    """Returns a JSON Schema as JSON."""
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2)
