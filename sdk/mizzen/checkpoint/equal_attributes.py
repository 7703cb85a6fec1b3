"""The attributes that all ranks of a gang have saved with the same values: a gang of another size loads these."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mizzen.checkpoint import parts
from mizzen.checkpoint.attributes import ATTRIBUTES
from mizzen.checkpoint.errors import CheckpointWarning

_TOLD = 5
"""Number of attributes that a warning names."""


def equal_attributes(saved: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Return what is equal in the attributes of all ranks (`ChangedAttributes.changed`); {} if nothing is.

    A `CheckpointWarning` names the others, of the checkpoint `where`.
    """
    flat = [dict(_flat(one)) for one in saved]
    names = dict.fromkeys(name for one in flat for name in one)
    equal = {name for name in names if all(name in one and _is_equal(one[name], flat[0][name]) for one in flat)}
    if lost := [f"{path}.{name}" if name else path for kind, path, name in names if (kind, path, name) not in equal]:
        more = f" and {len(lost) - _TOLD} more" if len(lost) > _TOLD else ""
        message = (
            f"{where}: the gang had {len(saved)} ranks, and these attributes differed between them, so they are not "
            f"restored: {', '.join(lost[:_TOLD])}{more}"
        )
        warnings.warn(message, CheckpointWarning, stacklevel=8)
    if not equal:
        return {}
    found: dict[str, Any] = {"values": {}, "generators": {}, "modes": {}, "apart": {}, "made": {}}
    for kind, path, name in filter(equal.__contains__, names):
        if kind == "modes":
            found[kind][path] = flat[0][kind, path, name]
            continue
        found[kind].setdefault(path, {})[name] = flat[0][kind, path, name]
        for more in ("apart", "made") if kind == "values" else ():
            if name in saved[0].get(more, {}).get(path, ()):
                found[more].setdefault(path, []).append(name)
    return found


def _flat(saved: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], Any]]:
    for kind in ("values", "generators"):
        for path, found in saved.get(kind, {}).items():
            yield from (((kind, path, name), one) for name, one in found.items())
    yield from ((("modes", path, ""), mode) for path, mode in saved.get("modes", {}).items())


def _is_equal(one: Any, other: Any) -> bool:
    encoded = [parts.encode(ATTRIBUTES, {"value": value}) for value in (one, other)]
    return encoded[0][0] == encoded[1][0] and b"".join(encoded[0][1]) == b"".join(encoded[1][1])
