"""A position in a document: a value, its path, and the list that collects the document's errors."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from api.bodies import unstorable
from api.documents.loading import Keys, Value
from api.problems import MAX_ERRORS, FieldError
from domain.ids import NAME_RULE, TABLE_RULE, is_name, is_table_name

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_/.-]{1,100}")
_LONGEST_TYPO = 100
_UNTIL = "-complete-until"
"""Suffix of the environment variable with the time up to which a stale table is complete."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the most similar word in `known`, ignoring case; None: no word is similar enough."""
    if len(word) > _LONGEST_TYPO:
        return None
    by_fold = {k.casefold(): k for k in sorted(known, reverse=True)}
    found = get_close_matches(word.casefold(), sorted(by_fold), n=1, cutoff=0.6)
    return by_fold[found[0]] if found else None


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


@dataclass(frozen=True)
class At:
    """A value in the document with its path. If the value is invalid, a reader adds an error and returns None."""

    path: str
    value: Value
    problems: list[FieldError]

    def wrong(self, message: str, suggestion: str | None = None) -> None:
        """Adds an error about this value."""
        self.problems.append(FieldError(self.path, message, self.value, suggestion))

    def missing(self, key: str, message: str) -> None:
        """Adds an error: `key` is missing in this mapping."""
        self.problems.append(FieldError(f"{self.path}.{key}" if self.path else key, f"missing: {message}"))

    def child(self, key: str | int, value: Value) -> "At":
        """Returns the position of a member of this value."""
        if isinstance(key, int):
            return At(f"{self.path}[{key}]", value, self.problems)
        shown = key if _PLAIN_KEY.fullmatch(key) else repr(key[:100])
        return At(f"{self.path}.{shown}" if self.path else shown, value, self.problems)

    # ------------------------------------------------------------------------------------------------- collections

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
        if isinstance(self.value, Keys):
            for key in self.value.twice:
                self.child(key, None).wrong("this key is given twice")
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

    # ----------------------------------------------------------------------------------------------------- scalars

    def text(self, wanted: str = "a string", most: int = 1000) -> str | None:
        """Returns a string of at most `most` bytes."""
        if not isinstance(self.value, str):
            hint = ""
            if isinstance(self.value, bool):
                hint = " (YAML reads yes, no, on, off, true and false without quotes as one); put it in quotes"
            elif isinstance(self.value, int | float):
                hint = "; put it in quotes"
            self.wrong(f"must be {wanted}, it is {kind_of(self.value)}{hint}")
            return None
        if (bad := unstorable(self.value)) is not None:
            self.wrong(f"must be {wanted}, it {bad}")
            return None
        size = len(self.value.encode())
        if size > most:
            self.wrong(f"must have at most {most} bytes, it has {size}")
            return None
        return self.value

    def word(self, wanted: str, most: int) -> str | None:
        """Returns a string, or an integer converted to a string."""
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self.value)
        return self.text(wanted, most)

    def name(self) -> str | None:
        """Returns a name that follows `domain.ids.NAME_RULE`."""
        text = self.text("a name")
        if text is not None and not is_name(text):
            self.wrong(f"must be a name: {NAME_RULE}")
            return None
        return text

    def names(self, wanted: str, most: int) -> "list[tuple[At, str]]":
        """Returns the names in a list; duplicates are errors."""
        found: dict[str, At] = {}
        for item in self.items(wanted, most):
            name = item.name()
            if name in found:
                item.wrong("is given twice")
            elif name is not None:
                found[name] = item
        return [(item, name) for name, item in found.items()]

    def tables(self, most: int) -> "list[tuple[At, str]]":
        """Returns the table names in a list. Duplicates are errors, as are tables with equal environment variables."""
        found: dict[str, tuple[At, str]] = {}
        for item in self.items("tables", most):
            name = item.text("a table's name")
            if name is None:
                continue
            if not is_table_name(name):
                item.wrong(f"must be a table's name: {TABLE_RULE}")
                continue
            variable = name.replace(".", "--")
            other = found.get(variable.removesuffix(_UNTIL)) or found.get(variable + _UNTIL) or found.get(variable)
            if other is None:
                found[variable] = item, name
            elif name == other[1]:
                item.wrong("is given twice")
            else:
                item.wrong(f"conflicts with {other[1]}: both tables have the same environment variable")
        return list(found.values())

    def integer(self, low: int, high: int) -> int | None:
        """Returns an integer from `low` to `high`."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.wrong(f"must be an integer from {low} to {high}{self._unless(int)}")
            return None
        return value

    def truth(self) -> bool | None:
        """Returns a boolean."""
        if not isinstance(self.value, bool):
            self.wrong(f"must be true or false, it is {kind_of(self.value)}")
            return None
        return self.value

    def number(self, low: float, high: float) -> float | None:
        """Returns a number from `low` to `high`."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.wrong(f"must be a number from {low:g} to {high:g}{self._unless(int, float)}")
            return None
        return float(value)

    def _unless(self, *kinds: type) -> str:
        is_one = isinstance(self.value, kinds) and not isinstance(self.value, bool)
        return "" if is_one else f", it is {kind_of(self.value)}"
