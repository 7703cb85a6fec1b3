"""References to variables, `$NAME` and `${NAME}`, in the strings of a value of JSON."""

import re
from collections.abc import Mapping
from typing import Any

_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def filled_in(value: Any, env: Mapping[str, str]) -> Any:
    """Returns the value with `$NAME` and `${NAME}` replaced in its strings, for the variables in `env`."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: env.get(match[1] or match[2], match[0]), value)
    if isinstance(value, list):
        return [filled_in(one, env) for one in value]
    if isinstance(value, dict):
        return {filled_in(key, env): filled_in(one, env) for key, one in value.items()}
    return value


def references(value: Any) -> set[str]:
    """Returns the names of the variables to which strings of the value refer, as `filled_in` finds them."""
    if isinstance(value, str):
        return {match[1] or match[2] for match in _REFERENCE.finditer(value)}
    inner = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
    return {name for one in inner for name in references(one)}
