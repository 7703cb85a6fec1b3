"""`mizzen json-schema`: the JSON Schemas of all kinds of documents."""

import json
from typing import Any

from api.documents import schema
from domain.documents import json_schema
from infra.stack.fleet import Fleet
from simulation.fleet import SimulatedFleet
from simulation.reclaim.documents import Document
from tetris.documents import instance_schema


def schema_of(kind: str) -> str:
    """Returns the JSON Schema of a kind of document as JSON."""
    schemas: dict[str, Any] = {
        "workload": schema.DOCUMENT,
        "service": schema.SERVICE_DOCUMENT,
        "fleet": json_schema(Fleet),
        "simulated-fleet": json_schema(SimulatedFleet),
        "scenario": json_schema(Document),
        "instance": instance_schema(),
    }
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schemas[kind]}, indent=2)
