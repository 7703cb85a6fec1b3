"""Pictures of a state: summaries that are cheap to take between two steps, to compare the states of two processes."""

import json
import math
import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

from mizzen.checkpoint import differences, parts
from mizzen.checkpoint.differences import Difference
from mizzen.checkpoint.gpu_copies import bytes_of
from mizzen.checkpoint.presync import offsets, sample
from mizzen.checkpoint.tensors import Stored, live_memory, loaded
from mizzen.checkpoint.tracked_objects import RNG

Picture: TypeAlias = Mapping[str, Any]
"""Part name to its tree as JSON, and the digests of its tensors. If the time was over, some are missing."""
_SAMPLE_BYTES = 512
"""A sample of a tensor. It is short, because a state can have thousands of tensors."""


def picture(state: Mapping[str, Any], limit_s: float = math.inf) -> Picture:
    """Return a picture of a state: of as many tensors as `limit_s` seconds suffice for, and of at least one part."""
    found: dict[str, Any] = {}
    ends_s = time.monotonic() + limit_s
    for name, value in state.items():
        if found and time.monotonic() > ends_s:
            break
        flat = parts.check(name, value)
        if flat is None:
            found[name] = {"digest": _digest(_sample(parts.encode(name, value)[1]))}
            continue
        tensors = found.setdefault(name, {"tree": flat.text, "tensors": {}})["tensors"]
        for key, one in flat.tensors.items():
            if time.monotonic() > ends_s:
                break
            tensors[key] = f"{_digest(_sampled(one))} of {one.dtype} {one.shape}"
    return found


def differing(left: Picture, right: Picture) -> list[Difference]:
    """Return the entries that differ between two pictures, of those in both, numbers and texts before tensors.

    If the weights differ, all tensors do, so a learning rate or a counter is more informative.
    """
    values: list[Difference] = []
    tensors: list[Difference] = []
    for found in differences.between(*_read(left, right)):
        name, kind, *path = found.path.split("/")
        if kind == "tree":
            (tensors if name == RNG else values).append(Difference("/".join((name, *path)), found.how))
        else:
            how = "its bits differ" if " instead of " in found.how else found.how
            tensors.append(Difference("/".join((name, *path)), how))
    return values + tensors


def _read(left: Picture, right: Picture) -> list[dict[str, Any]]:
    """Return two pictures with their trees parsed, without what is only in one of them.

    The trees name the tensors, so a tensor that only one state has is a difference of the trees.
    """
    read: list[dict[str, Any]] = []
    for one, other in ((left, right), (right, left)):
        read.append({})
        for name, part in one.items():
            if name in other and "tree" in part:
                seen = other[name].get("tensors", {})
                tensors = {key: digest for key, digest in part["tensors"].items() if key in seen}
                read[-1][name] = {"tree": _plain(json.loads(part["tree"])), "tensors": tensors}
            elif name in other:
                read[-1][name] = part
    return read


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


def _sampled(one: Stored) -> bytes:
    """Return a sample of a tensor; of a GPU's, only the sample is copied to the host."""
    if one.on_gpu is None:
        return _sample([one.read()])
    content = bytes_of(one.on_gpu)
    pieces = [content[low : low + _SAMPLE_BYTES] for low in offsets(len(content))]
    return bytes(live_memory(loaded("torch").cat(pieces).cpu())) if len(content) else b""


def _sample(chunks: Any) -> bytes:
    return sample(chunks, sum(memoryview(chunk).nbytes for chunk in chunks), _SAMPLE_BYTES)


def _digest(sampled: bytes) -> str:
    return blake2b(sampled, digest_size=16).hexdigest()
