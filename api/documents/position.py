"""A position in a document: a value and its path; errors and findings are collected for the whole document."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from api.documents.syntax import DocumentKeys, Value
from api.problems import MAX_ERRORS, FieldError, nearest

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_/.-]{1,100}")
ONCE = "DocumentKeys are unique"


def listed(names: Iterable[str], limit: int = 12) -> str:
    """Returns `a, b, c`, sorted; beyond `limit` names it ends with the number of the others."""
    ordered = sorted(names)
    return ", ".join(ordered[:limit]) + (f" and {len(ordered) - limit} more" if len(ordered) > limit else "")


def kind_of(value: Value) -> str:
    """Returns the type of a value as text for error messages."""
    if isinstance(value, bool):
        return "a boolean"
    names = {type(None): "empty", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "a mapping")


@dataclass
class Findings:
    """The findings of reading a document, in addition to its values."""

    problems: list[FieldError] = field(default_factory=list)
    names: "dict[str, list[tuple[At, str]]]" = field(default_factory=dict)
    """Values that must be checked against the installation later, such as names of its objects, by kind."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user about valid fields that have no effect, or a different effect than in SkyPilot."""


@dataclass(frozen=True)
class At:
    """A value in the document with its path. If the value is invalid, a reader adds an error and returns None."""

    path: str
    value: Value
    found: Findings = field(default_factory=Findings)

    @property
    def problems(self) -> list[FieldError]:
        """The errors of the whole document."""
        return self.found.problems

    def wrong(self, message: str, suggestion: str | None = None, *, rule: str | None = None) -> Any:
        """Adds an error about this value, and returns None.

        `rule` is the broken rule if only the schema's description states it.
        """
        self.problems.append(FieldError(self.path, message, self.value, suggestion, rule))

    def missing(self, key: str, message: str, *, rule: str | None = None) -> None:
        """Adds an error: `key` is missing in this mapping."""
        self.problems.append(FieldError(f"{self.path}.{key}" if self.path else key, f"missing: {message}", rule=rule))

    def name(self, kind: str, value: str) -> None:
        """Records a value of a kind that must be checked against the installation later."""
        self.found.names.setdefault(kind, []).append((self, value))

    def named(self, kind: str) -> "list[tuple[At, str]]":
        """Returns the recorded values of a kind in the whole document, with their positions."""
        return self.found.names.get(kind, [])

    def get(self, *keys: str) -> "At":
        """Returns the position of a member, or of a member of a member; its value is None if it is absent."""
        at = self
        for key in keys:
            at = at.child(key, at.value.get(key) if isinstance(at.value, dict) else None)
        return at

    def with_value(self, value: Value) -> "At":
        """Returns the same position with another value."""
        return At(self.path, value, self.found)

    def child(self, key: str | int, value: Value) -> "At":
        """Returns the position of a member of this value."""
        if isinstance(key, int):
            return At(f"{self.path}[{key}]", value, self.found)
        shown = key if _PLAIN_KEY.fullmatch(key) else repr(key[:100])
        return At(f"{self.path}.{shown}" if self.path else shown, value, self.found)

    def section(self, known: Collection[str], unlisted: Collection[str] = ()) -> "dict[str, At]":
        """Returns the members of a mapping and adds an error for each key that is in neither collection.

        Members with the value null are omitted. The result is empty if the value is not a mapping. Messages list and
        suggest keys of `known` only.
        """
        members = self.entries("a mapping with the keys " + ", ".join(known))
        for key in [k for k in members if k not in known and k not in unlisted]:
            place = members.pop(key)
            meant = nearest(key, known) if len(place.problems) < MAX_ERRORS else None  # More are not shown.
            hint = f"; did you mean {meant}?" if meant else f"; the known keys are {', '.join(known)}"
            place.problems.append(FieldError(place.path, f"unknown key{hint}", key, meant))
        return {key: place for key, place in members.items() if place.value is not None}

    def entries(self, wanted: str, most: int | None = None) -> "dict[str, At]":
        """Returns the members of a mapping with arbitrary keys, at most `most`."""
        if not isinstance(self.value, dict):
            self.wrong(f"must be {wanted}, it is {kind_of(self.value)}")
            return {}
        if isinstance(self.value, DocumentKeys):
            for key in self.value.twice:
                self.child(key, None).wrong("this key is given twice", rule=ONCE)
        if most is not None and len(self.value) > most:
            self.wrong(f"must have at most {most} entries, it has {len(self.value)}")
            return {}
        return {key: self.child(key, value) for key, value in self.value.items()}

    def items(self, wanted: str, most: int) -> "list[At]":
        """Returns the members of a list, at most `most`."""
        if not isinstance(self.value, list):
            self.wrong(f"must be a list of {wanted}, it is {kind_of(self.value)}")
            return []
        if len(self.value) > most:
            self.wrong(f"must have at most {most} entries, it has {len(self.value)}")
            return []
        return [self.child(number, value) for number, value in enumerate(self.value)]
