"""Forms of values: each reads a value with good error messages, and has the JSON Schema of the values that it accepts.

A document is declared once, as a section of fields. Its schema accepts a document exactly if reading it finds no error,
except for rules that JSON Schema cannot express: relations between values, and sizes in bytes. Such a rule is a
sentence, which is in the schema's description and in `FieldError.rule` of its errors.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from api.bodies import unstorable
from api.documents.position import At, kind_of
from api.problems import nearest
from domain.ids import NAME_LENGTH, NAME_PATTERN, NAME_RULE
from domain.patterns import durations, in_any_case, matching, sizes
from domain.units import parse_duration_s, parse_size_bytes

Schema = dict[str, Any]
MOST_WORD = 2**53 - 1
"""The largest integer that stands for a string: JSON readers may round a larger one."""
UNICODE = "Strings are Unicode text, without unpaired surrogates"
_STORABLE = r"^[^\x00]*$"
SCRIPT = r"^[^\x00]*[^\x00\t-\r ][^\x00]*$"
"""The pattern of a text that is not blank."""


@dataclass(frozen=True)
class Form:
    """The form of a value."""

    schema: Schema
    """The JSON Schema (2020-12) of valid values."""
    read: Callable[[At], Any]
    """Function that returns the value; if the value is invalid, it adds errors and returns None."""

    def to(self, convert: Callable[[Any], Any]) -> "Form":
        """Returns the form with a conversion of valid values."""
        return self.checked(lambda _, value: convert(value))

    def checked(self, check: Callable[[At, Any], Any], *rules: str) -> "Form":
        """Returns the form with rules that JSON Schema cannot express.

        `check` gets a value, adds errors with their rules, and returns the value that is used.
        """

        def read(at: At) -> Any:
            value = self.read(at)
            return None if value is None else check(at, value)

        return Form(_described(self.schema, "", *rules), read)

    def read_as(self, at: At, value: Any, rule: str) -> Any:
        """Reads another value with the form, at the position of the present one. Its errors are those of `rule`."""
        scratch = At(at.path, value)
        result = self.read(scratch)
        at.problems.extend(replace(problem, rule=rule) for problem in scratch.problems)
        return result


def _described(schema: Schema, before: str, *after: str) -> Schema:
    text = ". ".join(filter(None, [before, schema.get("description", ""), *after]))
    return schema | ({"description": text} if text else {})


def _or_null(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    outer: Schema = {key: schema[key] for key in ("description", "default") if key in schema}
    return {"anyOf": [{k: v for k, v in schema.items() if k not in outer}, {"type": "null"}], **outer}


# -------------------------------------------------------------------------------------------------------------- scalars


def text(
    wanted: str = "a string",
    most: int = 1000,
    pattern: str = _STORABLE,
    message: str = "",
    *,
    never: tuple[str, ...] = (),
    in_bytes: bool = False,
    kind: str | None = None,
) -> Form:
    """Returns the form of a string.

    Args:
        wanted: description of the valid values, for messages.
        most: the largest number of characters.
        pattern: regular expression that the string must match.
        message: the error message for a string that does not match.
        never: regular expressions of strings that are invalid although they match `pattern`.
        in_bytes: whether `most` is a number of bytes.
        kind: the kind of object that the string names, whose existence is checked later (`At.named`).
    """
    unit = "bytes" if in_bytes else "characters"
    size_rule = f"At most {most} bytes in UTF-8"

    def read(at: At) -> Any:
        value = at.value
        if not isinstance(value, str):
            hint = ""
            if isinstance(value, bool):
                hint = " (YAML reads yes, no, on, off, true and false without quotes as one); put it in quotes"
            elif isinstance(value, int | float):
                hint = "; put it in quotes"
            at.wrong(f"must be {wanted}, it is {kind_of(value)}{hint}")
        elif (bad := unstorable(value)) is not None:
            at.wrong(f"must be {wanted}, it {bad}", rule=None if "\0" in value else UNICODE)
        elif (size := len(value.encode()) if in_bytes else len(value)) > most:
            at.wrong(f"must have at most {most} {unit}, it has {size}", rule=size_rule if len(value) <= most else None)
        elif not re.fullmatch(pattern, value) or any(re.search(one, value) for one in never):
            at.wrong(message)
        else:
            if kind is not None:
                at.name(kind, value)
            return value
        return None

    schema = matching(pattern, *never) | {"maxLength": most}
    return Form(_described(schema, "", *([size_rule] if in_bytes else [])), read)


def name(kind: str | None = None) -> Form:
    """Returns the form of a name that follows `domain.ids.NAME_RULE`. `kind` is as for `text`."""
    return text("a name", NAME_LENGTH, NAME_PATTERN, f"must be a name: {NAME_RULE}", kind=kind)


NAME = name()


def word(form: Form) -> Form:
    """Returns the form of a string; an integer is accepted and becomes a string."""

    def read(at: At) -> Any:
        return str(at.value) if is_integer(at.value) and abs(at.value) <= MOST_WORD else form.read(at)

    return Form({"anyOf": [form.schema, {"type": "integer", "minimum": -MOST_WORD, "maximum": MOST_WORD}]}, read)


def constant(value: int, message: str) -> Form:
    """Returns the form of a number that is the only valid one."""

    def read(at: At) -> Any:
        return value if is_integer(at.value) and at.value == value else at.wrong(message)

    return Form({"const": value}, read)


def integer(low: int, high: int) -> Form:
    """Returns the form of an integer from `low` to `high`."""

    def read(at: At) -> Any:
        if is_integer(at.value) and low <= at.value <= high:
            return int(at.value)
        is_int = isinstance(at.value, int) and not isinstance(at.value, bool)
        return at.wrong(f"must be an integer from {low} to {high}{'' if is_int else _it_is(at)}")

    return Form({"type": "integer", "minimum": low, "maximum": high}, read)


def number(low: float, high: float) -> Form:
    """Returns the form of a number from `low` to `high`."""

    def read(at: At) -> Any:
        if is_number(at.value) and low <= at.value <= high:
            return float(at.value)
        return at.wrong(f"must be a number from {low:g} to {high:g}{'' if is_number(at.value) else _it_is(at)}")

    return Form({"type": "number", "minimum": low, "maximum": high}, read)


def _truth(at: At) -> Any:
    return at.value if isinstance(at.value, bool) else at.wrong(f"must be true or false{_it_is(at)}")


TRUTH = Form({"type": "boolean"}, _truth)
"""The form of a boolean."""


def one_of(words: tuple[str, ...], wanted: str, *, folded: bool = False) -> Form:
    """Returns the form of a string that must be one of `words`, ignoring case if `folded`."""

    def read(at: At) -> Any:
        given = text(wanted).read(at)
        found = given.lower() if given is not None and folded and given.isascii() else given
        if found is None or found in words:
            return found
        return at.wrong(f"must be one of {', '.join(words)}", nearest(found, words))

    return Form(matching(f"^{in_any_case(words)}$") if folded else {"enum": list(words)}, read)


def duration(low_s: float, high_s: float) -> Form:
    """Returns the form of a number of seconds, or of a text such as `1h30m`; `patterns.durations` limits the bounds."""
    pattern = f"^{durations(low_s, high_s)}$"

    def read(at: At) -> Any:
        if isinstance(at.value, str):
            try:
                seconds = parse_duration_s(at.value)
            except ValueError as error:
                return at.wrong(f"{error}, or a number of seconds")
        elif is_number(at.value):
            seconds = float(at.value)
        else:
            return at.wrong("must be a duration such as 30s, 10m, 2h or 1d, or a number of seconds")
        if not low_s <= seconds <= high_s:
            return at.wrong(f"must be from {low_s:g} to {high_s:g} seconds")
        if isinstance(at.value, str) and not re.fullmatch(pattern, at.value):
            return at.wrong("must be one number with at most three decimal places, or parts as in 1h30m, the largest "
                            "unit first and each further part below one of the unit before")  # fmt: skip
        return seconds

    says = f"A duration such as 30s, 10m, 1h30m or 2d, or a number of seconds, from {low_s:g} to {high_s:g} seconds"
    return Form({"anyOf": [matching(pattern), number(low_s, high_s).schema], "description": says}, read)


def size(low_bytes: int, high_bytes: int, bounds: str) -> Form:
    """Returns the form of a number of bytes, or of a text such as `512MiB` or `16GB`. `bounds` are for messages."""
    pattern = f"^{sizes(low_bytes, high_bytes)}$"

    def read(at: At) -> Any:
        try:
            found: Any = parse_size_bytes(at.value) if isinstance(at.value, str) else at.value
        except ValueError:
            found = None
        if not is_integer(found):
            return at.wrong("must be a size such as 512MiB or 16GB, or a whole number of bytes")
        if not low_bytes <= found <= high_bytes:
            return at.wrong(f"must be from {bounds}, it is {int(found)} bytes")
        if isinstance(at.value, str) and not re.fullmatch(pattern, at.value):
            return at.wrong("must be a number with at most three decimal places and a unit, such as 1.5GiB")
        return int(found)

    says = f"A size such as 512MiB or 16GB, or a number of bytes, from {bounds}"
    return Form({"anyOf": [matching(pattern), integer(low_bytes, high_bytes).schema], "description": says}, read)


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer in the sense of JSON Schema, where 1.0 is an integer."""
    return value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Returns whether a value is a number in the sense of JSON Schema."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _it_is(at: At) -> str:
    return f", it is {kind_of(at.value)}"


# ---------------------------------------------------------------------------------------------------------- collections


def list_of(
    items: Form,
    wanted: str,
    most: int,
    *,
    empty: str | None = None,
    unique: bool = False,
    first: Form | None = None,
    each: tuple[Callable[[At, Any, list[Any]], None], str] | None = None,
) -> Form:
    """Returns the form of a list. Invalid items are left out.

    Args:
        items: the form of an item.
        wanted: description of the items for messages, in the plural.
        most: the largest number of items.
        empty: the error message for an empty list; None: it is valid.
        unique: whether an item, a string, can be given only once.
        first: the form of the first item; None: the same as the others.
        each: a function that compares each valid item with the earlier ones and adds errors; and its rule.
    """

    def read(at: At) -> Any:
        if empty is not None and at.value == []:
            at.wrong(empty)
        found: list[Any] = []
        seen: set[str] = set()
        for position, place in enumerate(at.items(wanted, most)):
            value = (first if position == 0 and first is not None else items).read(place)
            if unique and isinstance(place.value, str) and place.value in seen:
                place.wrong("is given twice")
            elif value is not None:
                if each is not None:
                    each[0](place, value, found)
                found.append(value)
            seen |= {place.value} if isinstance(place.value, str) else set()
        return found if isinstance(at.value, list) else None

    schema = {"type": "array", "items": items.schema, "maxItems": most} | ({"uniqueItems": True} if unique else {})
    schema |= ({"minItems": 1} if empty is not None else {}) | (
        {} if first is None else {"prefixItems": [first.schema]}
    )
    return Form(_described(schema, "", *([] if each is None else [each[1]])), read)


@dataclass(frozen=True)
class Keys:
    """The form of a mapping's keys."""

    pattern: str
    message: str
    reserved: Mapping[str, str]
    """Patterns of keys that are not allowed, with the reason."""

    def check(self, at: At, key: str) -> bool:
        """Returns whether a key is valid; if not, adds an error at its value."""
        reasons = [reason.format(key) for pattern, reason in self.reserved.items() if re.search(pattern, key)]
        if not re.fullmatch(self.pattern, key):
            reasons = [self.message]
        if reasons:
            at.wrong(reasons[0])
        return not reasons


def map_of(keys: Keys, values: Form, wanted: str, most: int) -> Form:
    """Returns the form of a mapping with keys of the user, at most `most`. Invalid members are left out."""

    def read(at: At) -> Any:
        found = {}
        for key, place in at.entries(wanted, most).items():
            value = values.read(place)
            if keys.check(place, key) and value is not None:
                found[key] = value
        return found if isinstance(at.value, dict) else None

    names = matching(keys.pattern, *keys.reserved)
    schema = {"type": "object", "additionalProperties": values.schema, "propertyNames": names, "maxProperties": most}
    return Form(schema, read)


def cases(forms: Mapping[type | tuple[type, ...], Form], message: str) -> Form:
    """Returns the form of a value whose form depends on its type. `message` says what is wrong with other types."""

    def read(at: At) -> Any:
        for kind, form in forms.items():
            if isinstance(at.value, kind) and not isinstance(at.value, bool):
                return form.read(at)
        return at.wrong(message.format(kind_of(at.value)))

    schemas = [form.schema for form in forms.values()]
    return Form(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, read)


@dataclass(frozen=True)
class Field:
    """A field of a section."""

    form: Form
    description: str = ""
    to: str | None = None
    """The name in the section's value; None: that of the field; empty: the value is a dictionary of several names."""
    missing: str | None = None
    """The error message if the field is absent; None: the field is optional."""
    default: Any = None
    """For the schema: what an absent field means, if the section's model does not say it."""


def section(
    fields: Mapping[str, Field],
    description: str = "",
    model: type[BaseModel] | None = None,
    refused: Mapping[str, str] | None = None,
    ignored: Mapping[str, str] | None = None,
) -> Form:
    """Returns the form of a mapping with these fields and no others. A field with the value null counts as absent.

    Args:
        fields: the fields.
        description: for the schema.
        model: the class that a valid section is converted to, with its defaults; None: a dictionary of the valid
            fields.
        refused: fields of similar documents that are not supported, with what to do instead. Messages about typing
            errors do not list them.
        ignored: fields of similar documents that are accepted without effect, with the reason.
    """
    refused, ignored = refused or {}, ignored or {}

    def read(at: At) -> Any:
        before = len(at.problems)
        members = at.section(tuple(fields), (*refused, *ignored))
        values: dict[str, Any] = {}
        for key, field in fields.items():
            value = field.form.read(members[key]) if key in members else None
            if value is not None:
                values |= value if field.to == "" else {field.to or key: value}
            elif key not in members and field.missing is not None and isinstance(at.value, dict):
                at.missing(key, field.missing)
        for key, place in members.items():
            if key in refused:
                place.wrong(f"is not supported: {refused[key]}")
            elif key in ignored:
                at.found.notes.append(f"{place.path} has no effect: {ignored[key]}")
        if model is None:
            return values
        return None if len(at.problems) > before else model(**values)

    defaults = {} if model is None else {key: one.default for key, one in model.model_fields.items()}
    properties = {key: _property(field, defaults.get(field.to or key)) for key, field in fields.items()}
    properties |= {key: {"description": f"No effect: {why}"} for key, why in ignored.items()}
    properties |= {key: {"type": "null", "description": f"Not supported: {why}"} for key, why in refused.items()}
    required = [key for key, field in fields.items() if field.missing is not None]
    schema = {"type": "object", "properties": properties, "additionalProperties": False, "required": required}
    return Form(_described(schema, description), read)


def _property(field: Field, default: Any) -> Schema:
    schema = _described(field.form.schema, field.description)
    default = default if field.default is None else field.default
    schema |= {"default": default} if isinstance(default, int | float | str) else {}
    return schema if field.missing is not None else _or_null(schema)
