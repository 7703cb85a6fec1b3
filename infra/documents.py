"""Reads documents of operators, such as fleet files. Errors name the path, the value and the remedy."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from domain.documents import read
from domain.ids import RULES
from infra.errors import ConfigurationError
from infra.files import read_mapping, shown

M = TypeVar("M", bound=BaseModel)
_TIME = "a time with its zone, such as 2026-11-22T03:00:00Z"
_MESSAGES = {
    "missing": "is missing",
    "model_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "path_type": "must be a path",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "has too few entries ({actual_length}), it must have {min_length} or more",
    "too_long": "has too many entries ({actual_length}), it may have {max_length}",
    "string_pattern_mismatch": "must match {pattern}",
    "enum": "must be {expected}",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "string_too_long": "must have at most {max_length} characters",
    "timezone_aware": f"must be {_TIME}",
    "datetime_type": f"must be {_TIME}",
    "datetime_parsing": f"must be {_TIME}",
    "datetime_from_date_parsing": f"must be {_TIME}",
}


def read_document(model: type[M], path: Path, what: str) -> M:
    """Returns the document in a YAML file as `model`. `what` is the kind of file for error messages.

    Raises:
        ConfigurationError: the file cannot be read or is invalid. The message lists all problems.
    """
    try:
        return read(model, read_mapping(path, what))
    except ValidationError as error:
        raise ConfigurationError(f"{what} {path}:\n{problems(model, error)}") from None


def problems(model: type[BaseModel], error: ValidationError) -> str:
    """Returns all problems in `error`, one per line: the path, what is required, and the value."""
    return "\n".join(f"  {line}" for line in problem_lines(model, error))


def problem_lines(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Returns each problem in `error` as one line: the path, what is required, and the value."""
    found = error.errors(include_url=False)
    inner = {one["loc"][:length] for one in found for length in range(len(one["loc"]))}
    # pydantic also reports a list with invalid entries as too short; such errors of an outer path are dropped.
    return [_problem(model, one) for one in found if one["loc"] not in inner]


def _problem(model: type[BaseModel], found: Mapping[str, Any]) -> str:
    place, kind = found["loc"], found["type"]
    parts = [part for part in place if part != "[key]"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    if kind == "extra_forbidden":
        keys = _keys(model, place[:-1])
        near = difflib.get_close_matches(str(place[-1]), keys, 1)
        remedy = f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(keys)}"
        return f"{path}: unknown key; {remedy}"
    if kind in ("value_error", "assertion_error"):
        message = str(found["ctx"]["error"])
    elif rule := RULES.get(found.get("ctx", {}).get("pattern", "")):
        message = f"must be {rule}"
    else:
        bounds = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in found.get("ctx", {}).items()}
        message = _MESSAGES.get(kind, found["msg"]).format_map(bounds)
    value = "" if kind == "missing" or isinstance(found["input"], dict | list) or _is_secret(place) else found["input"]
    return f"{path + ': ' if path else ''}{message}" + (f", it is {shown(value)}" if value != "" else "")


def _is_secret(place: Iterable[object]) -> bool:
    return bool({"api_key", "database"} & set(place))


def _keys(model: type[BaseModel], place: Iterable[object]) -> list[str]:
    """Returns the keys of the model at the path `place` in `model`."""
    at: Any = model
    for part in place:
        if isinstance(part, str) and _is_model(at):
            at = at.model_fields[part].annotation
        elif get_origin(at) is dict:
            at = get_args(at)[1]
        while get_origin(at) in (Union, UnionType, tuple, list):
            at = next(choice for choice in get_args(at) if choice not in (NoneType, ...))
    return sorted(at.model_fields) if _is_model(at) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
