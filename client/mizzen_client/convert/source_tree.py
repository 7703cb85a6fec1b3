"""YAML with the line of each value, and sections of it in which every key must be accounted for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import yaml

from mizzen_client import yaml_core
from mizzen_client.convert.conversion import CannotConvert, Conversion, shown

MAX_VALUES = 20_000
"""Values in a file, where each use of an alias counts with all that it contains."""
MAX_DEPTH = 40
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Located:
    """A value of a document with its line."""

    line: int
    value: Any
    """A scalar, a list of nodes, or a mapping of keys to nodes."""

    @property
    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {key: node.plain for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain for node in self.value]
        return self.value

    @property
    def items(self) -> "list[Located]":
        """The values of a list; a single value is a list of one, and null is an empty list."""
        if isinstance(self.value, list):
            return self.value
        return [] if self.value is None else [self]

    @property
    def keys(self) -> "dict[str, Located]":
        """The mapping; empty if the value is not a mapping."""
        return self.value if isinstance(self.value, dict) else {}

    def within(self, *path: str) -> Any:
        """Return the plain value at a path of keys, or None."""
        node = self
        for key in path:
            if key not in node.keys:
                return None
            node = node.keys[key]
        return node.plain


def read_trees(text: str) -> list[Located]:
    """Return the documents of a YAML text; empty documents are left out.

    Raises:
        CannotConvert: the text is not YAML, or it is too large or too deep once its aliases are resolved.
    """
    try:
        composed = list(yaml_core.compose_all(text))
    except yaml_core.NotYaml as error:
        line, _, message = str(error).removeprefix(":").partition(": ")
        number = line.partition(":")[0]
        raise CannotConvert(int(number) if number.isdecimal() else 1, message or line.strip()) from None
    walk = _Walk()
    found = [walk.node(node, 0) for node in composed]
    return [node for node in found if node.value is not None]


class _Walk:
    """Turns YAML nodes into values, and counts them."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def node(self, found: yaml.Node, depth: int) -> Located:
        line = found.start_mark.line + 1
        self._left -= 1
        if self._left < 0:
            raise CannotConvert(line, f"more than {MAX_VALUES} values, with aliases (*) resolved; write fewer values")
        if depth > MAX_DEPTH:
            raise CannotConvert(line, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(found, yaml.SequenceNode):
            return Located(line, [self.node(one, depth + 1) for one in found.value])
        if isinstance(found, yaml.MappingNode):
            return Located(line, self._mapping(found, depth))
        try:
            value = yaml_core.scalar(found)
        except yaml_core.NotYaml as error:
            raise CannotConvert(line, str(error).partition(": ")[2]) from None
        if not isinstance(value, _SCALARS):
            raise CannotConvert(line, f"the tag {found.tag} is not supported; write the value without its tag")
        if isinstance(value, float) and not isfinite(value):
            raise CannotConvert(line, f"{found.value[:40]} is too large a number")
        if isinstance(value, str) and "\0" in value:
            raise CannotConvert(line, "a text with a NUL character, which no document may have")
        return Located(line, value)

    def _mapping(self, found: yaml.MappingNode, depth: int) -> dict[str, Located]:
        merged: dict[str, Located] = {}
        own: dict[str, Located] = {}
        for key, value in found.value:
            node = self.node(value, depth + 1)
            if key.tag != yaml_core.MERGE_TAG:
                # The line of a field is that of its key: a block of text begins on the next line.
                own[key.value] = Located(key.start_mark.line + 1, node.value)
                continue
            for one in node.items:
                if not isinstance(one.value, dict):
                    raise CannotConvert(one.line, "a merge key (<<) needs a mapping or a list of mappings")
                merged = {**one.value, **merged}
        return {**merged, **own}


class KeyedSection:
    """A mapping of the source. Each key must get a remark; `close` adds remarks for the keys that were not read."""

    def __init__(self, conversion: Conversion, node: Located | None, path: str = "") -> None:
        """Read the mapping `node`; None counts as an empty mapping.

        Raises:
            CannotConvert: the value is not a mapping.
        """
        if node is not None and node.value is not None and not isinstance(node.value, dict):
            raise CannotConvert(node.line, f"{path or 'the document'} must be a mapping, it is {shown(node.plain)!r}")
        self.conversion = conversion
        self.line = node.line if node is not None else 1
        self.path = path
        self._left = dict(node.keys) if node is not None else {}

    def name(self, key: str) -> str:
        """Return the path of a key."""
        return f"{self.path}.{key}" if self.path else key

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def has(self, *path: str) -> bool:
        """Return whether there is a value at a path of keys."""
        return path[0] in self._left and Located(self.line, self._left).within(*path) is not None

    def text_of(self) -> str:
        """Return the keys that were not read yet as one text, to search in."""
        return str(Located(self.line, self._left).plain)

    def take(self, key: str) -> Located | None:
        """Return the value of a key, for which the caller adds a remark. A key with null counts as absent."""
        node = self._left.pop(key, None)
        if node is not None and node.value is None:
            self.conversion.dropped(node.line, self.name(key), "it has no value")
            return None
        return node

    def section(self, key: str) -> "KeyedSection":
        """Return the section at a key, which is empty if the key is absent."""
        return KeyedSection(self.conversion, self.take(key), self.name(key))

    def each(self, key: str) -> "Iterator[KeyedSection]":
        """Yield a section for each item of the list at a key."""
        node = self.take(key)
        if node is not None and not isinstance(node.value, list):
            raise CannotConvert(node.line, f"{self.name(key)} must be a list, it is {shown(node.plain)!r}")
        for number, one in enumerate(node.items if node is not None else []):
            yield KeyedSection(self.conversion, one, f"{self.name(key)}[{number}]")

    def entries(self, key: str) -> dict[str, Located]:
        """Return the entries of the mapping at a key, for which the caller adds a remark.

        Raises:
            CannotConvert: the value is not a mapping.
        """
        node = self.take(key)
        if node is None:
            return {}
        if not isinstance(node.value, dict):
            raise CannotConvert(node.line, f"{self.name(key)} must be a mapping, it is {shown(node.plain)!r}")
        if not node.value:
            self.dropped(key, node, "it is empty")
        return node.keys

    def text(self, key: str) -> Located | None:
        """Return a scalar, as text.

        Raises:
            CannotConvert: the value is a list or a mapping.
        """
        node = self.take(key)
        if node is None:
            return None
        if isinstance(node.value, (dict, list)):
            raise CannotConvert(node.line, f"{self.name(key)} must be a single value, it is {shown(node.plain)!r}")
        return Located(node.line, as_text(node.value))

    def number(self, key: str, least: int = 0) -> Located | None:
        """Return a whole number of at least `least`.

        Raises:
            CannotConvert: the value is another one.
        """
        node = self.take(key)
        if node is None:
            return None
        given = node.value
        if isinstance(given, str) and given.isdecimal() and given.isascii() and len(given) < 16:
            given = int(given)
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            message = f"{self.name(key)} must be a whole number of at least {least}, it is {shown(node.plain)!r}"
            raise CannotConvert(node.line, message)
        return Located(node.line, given)

    def carried(self, key: str, node: Located, target: str) -> None:
        """Add the remark that a key has the same meaning in the field `target`."""
        self.conversion.carried(node.line, self.source(key, node), target)

    def changed(self, key: str, node: Located, target: str, why: str) -> None:
        """Add the remark that the meaning of a key in the field `target` differs."""
        self.conversion.changed(node.line, self.source(key, node), target, why)

    def dropped(self, key: str, node: Located, why: str) -> None:
        """Add the remark that a key is not needed."""
        self.conversion.dropped(node.line, self.source(key, node), why)

    def lost(self, key: str, node: Located, why: str) -> None:
        """Add the remark that a key has no counterpart."""
        self.conversion.lost(node.line, self.source(key, node), why)

    def source(self, key: str, node: Located) -> str:
        """Return a key with its value, if that is short."""
        value = node.plain
        is_short = isinstance(value, (int, float)) or (
            isinstance(value, str) and len(value) <= 60 and "\n" not in value
        )
        return f"{self.name(key)}: {as_text(value)}" if is_short else self.name(key)

    def close(self, dropped: Mapping[str, str], lost: Mapping[str, str]) -> None:
        """Add remarks for all keys that were not read, from the tables of reasons, or as unknown."""
        for key, node in self._left.items():
            if key in dropped or node.value is None:
                self.dropped(key, node, dropped.get(key, "it has no value"))
            else:
                self.lost(key, node, lost.get(key, "`mizzen convert` does not know this field; check its spelling"))
        self._left = {}


def as_text(value: Any) -> str:
    """Return a scalar as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
