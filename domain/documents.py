"""The base of the models of documents: values as strict as in JSON, and a JSON Schema that accepts the same."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, StringConstraints
from pydantic_core import CoreSchema, core_schema

from domain.ids import NAME_PATTERN
from domain.patterns import matching, sizes
from domain.units import parse_size_bytes

M = TypeVar("M", bound=BaseModel)


class RuleError(ValueError):
    """A value breaks a rule that JSON Schema cannot express, which `DocumentPart.rules` states."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class DocumentPart(BaseModel):
    """Base of the models. The docstrings of fields are their descriptions in the schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    rules: ClassVar[tuple[str, ...]] = ()
    """Sentences about what JSON Schema cannot express, for the schema's description."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns the schema with the rules in its description."""
        schema = handler(core)
        own = handler.resolve_ref_schema(schema)
        own["description"] = ". ".join([own.get("description", "").removesuffix("."), *cls.rules])
        return schema


def read(model: type[M], body: Any) -> M:
    """Returns the document that a body is, which JSON or YAML was parsed to.

    Raises:
        pydantic.ValidationError: the body is not valid.
    """
    return model.model_validate_json(json.dumps(_as_json(body), default=str), strict=True)


def _as_json(value: Any) -> Any:
    """Returns a value with integers in the place of equal fractions: in JSON, 1.0 is an integer."""
    if isinstance(value, dict):
        return {key: _as_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of a model. It accepts what `read` accepts, except for rules."""
    schema: dict[str, Any] = _tidy(model.model_json_schema())
    return schema


def _tidy(schema: Any) -> Any:
    """Returns a schema without generated titles, with descriptions in one line, and with patterns that are complete.

    pydantic's own schema of a mapping accepts keys that do not match.
    """
    if isinstance(schema, list):
        return [_tidy(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: one if key == "not" else _tidy(one)
        for key, one in schema.items()
        if not (key == "title" and isinstance(one, str))
    }
    if isinstance(found.get("description"), str):
        found["description"] = " ".join(found["description"].split())
    if "patternProperties" in found:
        ((pattern, found["additionalProperties"]),) = found.pop("patternProperties").items()
        found["propertyNames"] = matching(pattern)
    if isinstance(found.get("pattern"), str):
        found |= matching(found["pattern"])
    if isinstance(found.get("default"), float) and not math.isfinite(found["default"]):
        del found["default"]
    return found


@dataclass(frozen=True, eq=False)
class Stated:
    """Annotation of a type with its JSON Schema. The class of pydantic for this purpose imports a large module."""

    schema: Mapping[str, Any]

    def __get_pydantic_json_schema__(self, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns the schema."""
        return dict(self.schema)


@dataclass(frozen=True, eq=False)
class Written:
    """Annotation of a type whose values can also be written as text."""

    pattern: str
    message: str
    """What is wrong with a text that does not match."""
    convert: Callable[[str], Any] = str
    other: Mapping[str, Any] | None = None
    """The schema of values that are not text, which the type itself validates; None: documents have text only."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the validator."""
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Returns the schema."""
        text = matching(self.pattern)
        return text if self.other is None else {"anyOf": [text, dict(self.other)]}

    def _read(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not re.fullmatch(self.pattern, value):
            raise ValueError(self.message)
        return self.convert(value)


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A name that follows `domain.ids.NAME_RULE`."""
Level = Annotated[int, Field(ge=1, le=7)]
LevelKey = Annotated[int, Field(ge=1, le=7), Written("^[1-7]$", "must be a level from 1 (highest) to 7", int)]
"""A priority level as the key of a mapping."""
CountKey = Annotated[int, Field(ge=1), Written("^[1-9][0-9]{0,8}$", "must be a whole number from 1", int)]
"""A number of things as the key of a mapping."""
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 46
SizeBytes = Annotated[
    int,
    Field(ge=_LEAST_BYTES, le=_MOST_BYTES),
    Written(
        f"^{sizes(_LEAST_BYTES, _MOST_BYTES)}$", "must be a size from 1MiB to 64TiB, such as 512MiB or 16GB",
        parse_size_bytes, {"type": "integer", "minimum": _LEAST_BYTES, "maximum": _MOST_BYTES},
    ),
]  # fmt: skip
"""The size of a memory, in bytes."""
