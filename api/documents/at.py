"""A place in a document: a value, the path to it, and the list to which its problems go."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from api.bodies import unstorable
from api.documents.loading import Keys, Value
from api.problems import FieldError
from domain.ids import NAME_RULE, TABLE_RULE, is_name, is_table_name

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_/.-]{1,100}")
_LONGEST_TYPO = 100
_UNTIL = "-complete-until"
"""Of the variable that says of another table since when it is stale."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `word` was probably meant to be."""
    if len(word) > _LONGEST_TYPO:
        return None
    by_fold = {k.casefold(): k for k in sorted(known, reverse=True)}
    found = get_close_matches(word.casefold(), sorted(by_fold), n=1, cutoff=0.6)
    return by_fold[found[0]] if found else None


def listed(names: Iterable[str], limit: int = 12) -> str:
    """`a, b, c`, cut off where it gets long."""
    ordered = sorted(names)
    return ", ".join(ordered[:limit]) + (f" and {len(ordered) - limit} more" if len(ordered) > limit else "")


def kind_of(value: Value) -> str:
    """What a value is, in words."""
    if isinstance(value, bool):
        return "a truth value"
    names = {type(None): "empty", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "a mapping")


@dataclass(frozen=True)
class At:
    """A value in the document. Readers return None, and note why, where it is not what they want."""

    path: str
    value: Value
    problems: list[FieldError]

    def wrong(self, message: str, suggestion: str | None = None) -> None:
        """Notes a problem with this value."""
        self.problems.append(FieldError(self.path, message, self.value, suggestion))

    def missing(self, key: str, message: str) -> None:
        """Notes that `key` is not in this mapping."""
        self.problems.append(FieldError(f"{self.path}.{key}" if self.path else key, f"missing: {message}"))

    def child(self, key: str | int, value: Value) -> "At":
        """The place of a member."""
        if isinstance(key, int):
            return At(f"{self.path}[{key}]", value, self.problems)
        shown = key if _PLAIN_KEY.fullmatch(key) else repr(key[:100])
        return At(f"{self.path}.{shown}" if self.path else shown, value, self.problems)

    # ------------------------------------------------------------------------------------------------- collections

    def section(self, known: Collection[str]) -> "dict[str, At]":
        """The members of a mapping whose keys are all among `known`; empty where it is none.

        A member without a value (null) counts as left out.
        """
        members = self.entries("a mapping with the keys " + ", ".join(known))
        for key in [k for k in members if k not in known]:
            place = members.pop(key)
            meant = nearest(key, known)
            hint = f"; did you mean {meant}?" if meant else f"; known here are {', '.join(known)}"
            place.problems.append(FieldError(place.path, f"unknown key{hint}", key, meant))
        return {key: place for key, place in members.items() if place.value is not None}

    def entries(self, wanted: str, most: int | None = None) -> "dict[str, At]":
        """The members of a mapping with free keys, at most `most`."""
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
        """The members of a list, at most `most`."""
        if not isinstance(self.value, list):
            self.wrong(f"must be a list of {wanted}, it is {kind_of(self.value)}")
            return []
        if len(self.value) > most:
            self.wrong(f"must have at most {most} entries, it has {len(self.value)}")
            return []
        return [self.child(number, value) for number, value in enumerate(self.value)]

    # ----------------------------------------------------------------------------------------------------- scalars

    def text(self, wanted: str = "a string", most: int = 1000) -> str | None:
        """A text of at most `most` bytes."""
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
        """A text, or an integer as the text that it was written as."""
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self.value)
        return self.text(wanted, most)

    def name(self) -> str | None:
        """A name, as `domain.ids.NAME_RULE` says."""
        text = self.text("a name")
        if text is not None and not is_name(text):
            self.wrong(f"must be a name: {NAME_RULE}")
            return None
        return text

    def names(self, wanted: str, most: int) -> "list[tuple[At, str]]":
        """A list of different names."""
        found: dict[str, At] = {}
        for item in self.items(wanted, most):
            name = item.name()
            if name in found:
                item.wrong("is given twice")
            elif name is not None:
                found[name] = item
        return [(item, name) for name, item in found.items()]

    def tables(self, most: int) -> "list[tuple[At, str]]":
        """A list of different tables, as `domain.ids.TABLE_RULE` says, that have different variables in a task."""
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
                item.wrong(f"a task could not tell it from {other[1]}: both have the same variable")
        return list(found.values())

    def integer(self, low: int, high: int) -> int | None:
        """An integer within bounds."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.wrong(f"must be an integer from {low} to {high}{self._unless(int)}")
            return None
        return value

    def truth(self) -> bool | None:
        """True or false."""
        if not isinstance(self.value, bool):
            self.wrong(f"must be true or false, it is {kind_of(self.value)}")
            return None
        return self.value

    def number(self, low: float, high: float) -> float | None:
        """A number within bounds."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.wrong(f"must be a number from {low:g} to {high:g}{self._unless(int, float)}")
            return None
        return float(value)

    def _unless(self, *kinds: type) -> str:
        is_one = isinstance(self.value, kinds) and not isinstance(self.value, bool)
        return "" if is_one else f", it is {kind_of(self.value)}"
