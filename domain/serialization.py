"""Serialisation of documents that other versions of mizzen must be able to parse."""

from typing import Any


def without_unset(body: dict[str, Any], *fields: str) -> dict[str, Any]:
    """Returns a serialised model without those of `fields` that are None or False.

    Models forbid unknown fields, so a newer field may appear only in documents that use it.
    """
    return {name: value for name, value in body.items() if name not in fields or value not in (None, False)}
