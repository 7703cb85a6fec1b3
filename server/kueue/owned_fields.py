"""The fields of an object that a field manager has applied.

An apply removes the fields that its manager applied before and that it does not contain. A second program that applies
under the manager's name must therefore repeat all its fields.
"""

import json
from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]


def owned(managed: Mapping[str, Any], manager: str, part: str) -> dict[str, Any]:
    """Returns the fields of an object's part, such as `status`, that a manager has applied, with their values."""
    found: dict[str, Any] = {}
    for entry in managed["metadata"].get("managedFields", []):
        if entry.get("manager") != manager or entry.get("operation") != "Apply":
            continue
        fields = entry.get("fieldsV1", {}).get(f"f:{part}")
        if fields is not None and isinstance(managed.get(part), dict):
            found |= _picked(fields, managed[part])
    return found


def _picked(fields: Fields, value: Any) -> Any:
    """Returns the parts of a value that the fields (in the format FieldsV1) name."""
    inner = {key: below for key, below in fields.items() if key != "."}
    if not inner or value is None:
        return value
    if isinstance(value, dict):
        known = {key.removeprefix("f:"): below for key, below in inner.items() if key.startswith("f:")}
        return {key: _picked(below, value[key]) for key, below in known.items() if key in value}
    return [_picked(below, item) for item in value if (below := _of_item(inner, item)) is not None]


def _of_item(fields: Fields, item: Any) -> Fields | None:
    """Returns the fields of an item of a list, which are named by its keys or its value; None: they are not owned."""
    for key, below in fields.items():
        kind, _, text = key.partition(":")
        if kind == "v" and json.loads(text) == item:
            return {}
        keys = json.loads(text) if kind == "k" and isinstance(item, dict) else None
        if keys is not None and all(item.get(name) == wanted for name, wanted in keys.items()):
            found: Fields = below
            return found
    return None
