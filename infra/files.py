"""Reads YAML files that operators write, such as settings. Errors name the path, the value and the remedy."""

import difflib
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from infra.errors import ConfigurationError

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
}


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file; {} for an empty file. `what` is the kind of file for error messages.

    Raises:
        ConfigurationError: the file cannot be read, or does not contain a YAML mapping.
    """
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{what} {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.object[error.start]:#04x} at position {error.start}"
        raise ConfigurationError(f"{what} {path}: is not text ({place} is not UTF-8); it must be YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigurationError(f"{what} {path}: {place}{error.problem or 'is not YAML'}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{what} {path}: is not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigurationError(f"{what} {path}: is nested too deeply") from None
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise ConfigurationError(f"{what} {path}: must be a mapping of keys to values, it is {_shown(body)}")
    return body


def problems(model: type[BaseModel], error: ValidationError) -> str:
    """Returns all problems in `error`, one per line: the path, what is required, and the value."""
    found = error.errors(include_url=False)
    inner = {one["loc"][:length] for one in found for length in range(len(one["loc"]))}
    # pydantic also reports a list with invalid entries as too short; such errors of an outer path are dropped.
    return "\n".join(f"  {_problem(model, one)}" for one in found if one["loc"] not in inner)


def _problem(model: type[BaseModel], found: Mapping[str, Any]) -> str:
    place, kind = found["loc"], found["type"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if kind == "extra_forbidden":
        keys = _keys(model, place[:-1])
        near = difflib.get_close_matches(str(place[-1]), keys, 1)
        remedy = f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(keys)}"
        return f"{path}: unknown key; {remedy}"
    if kind in ("value_error", "assertion_error"):
        message = str(found["ctx"]["error"])
    else:
        message = _MESSAGES.get(kind, found["msg"]).format_map(found.get("ctx", {}))
    value = "" if kind == "missing" or isinstance(found["input"], dict | list) or _is_secret(place) else found["input"]
    return f"{path + ': ' if path else ''}{message}" + (f", it is {_shown(value)}" if value != "" else "")


def _is_secret(place: Iterable[object]) -> bool:
    return bool({"api_key", "database"} & set(place))


def _shown(value: object) -> str:
    return "empty" if value is None else reprlib.repr(value)


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


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, atomically and synced to the disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
