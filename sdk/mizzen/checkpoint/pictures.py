"""Pictures of a state: summaries that are cheap to take between two steps, to compare the states of two processes."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

from mizzen.checkpoint import differences, parts
from mizzen.checkpoint.differences import Difference
from mizzen.checkpoint.presync import sample
from mizzen.checkpoint.tracked_objects import RNG

Picture: TypeAlias = Mapping[str, Any]
"""Part name to its tree as JSON, and the digests of its tensors."""


def picture(state: Mapping[str, Any]) -> Picture:
    """Return a picture of a state."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        flat = parts.check(name, value)
        if flat is None:
            found[name] = {"digest": _digest(parts.encode(name, value)[1])}
        else:
            tensors = {key: _digest([one.read()]) + f" of {one.dtype}" for key, one in flat.tensors.items()}
            found[name] = {"tree": flat.text, "tensors": tensors}
    return found


def differing(left: Picture, right: Picture) -> list[Difference]:
    """Return the entries that differ between two pictures, numbers and texts before tensors.

    If the weights differ, all tensors do, so a learning rate or a counter is more informative.
    """
    values: list[Difference] = []
    tensors: list[Difference] = []
    for found in differences.between(_read(left), _read(right)):
        name, kind, *path = found.path.split("/")
        if kind == "tree":
            (tensors if name == RNG else values).append(Difference("/".join((name, *path)), found.how))
        else:
            how = "its bits differ" if " instead of " in found.how else found.how
            tensors.append(Difference("/".join((name, *path)), how))
    return values + tensors


def _read(one: Picture) -> dict[str, Any]:
    """Return a picture with its trees parsed."""
    return {
        name: {kind: _plain(json.loads(value)) if kind == "tree" else value for kind, value in part.items()}
        for name, part in one.items()
    }


def _plain(tree: Any) -> Any:
    """Return a tree of `mizzen.checkpoint.trees` without its notation, so that paths are those of the value."""
    if isinstance(tree, list):
        return [_plain(one) for one in tree]
    if not isinstance(tree, dict):
        return tree
    match list(tree.items()):
        case [("$dict", pairs)]:
            return {str(_plain(key)): _plain(value) for key, value in pairs}
        case [("$state_dict", [entries, _])]:
            return _plain(entries)
        case [(str(kind), inner)] if kind.startswith("$"):
            return _plain(inner)
    return {key: _plain(value) for key, value in tree.items()}


def _digest(chunks: Any) -> str:
    size_bytes = sum(memoryview(chunk).nbytes for chunk in chunks)
    return f"{blake2b(sample(chunks, size_bytes), digest_size=16).hexdigest()} {size_bytes}"
