"""Parses YAML and JSON to plain values, with limits on size and depth.

Only a subset of YAML is supported. Unquoted scalars are null, booleans, decimal numbers or strings; a time of day or
`010` is a string. `no`, `on` and similar words are booleans, as in YAML 1.1 and most tools; error messages mention this
where a string is expected. Keys are always strings. Anchors, tags and merge keys are not supported.
"""

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import yaml

MAX_DEPTH = 20
MAX_NODES = 20_000

Value = Any
"""None, bool, int, float, str, list of values, or `DocumentKeys` of values."""

_BOOL = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_NULL = {"", "~", "null", "Null", "NULL"}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_MAX_DIGITS = 18
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser, which reads a document of the maximum size in a tenth of a second; PyYAML's own takes up to five
seconds of CPU time, in which it delays all other requests."""
_DIRECTIVE = re.compile("(?:^|[\r\n\x85\u2028\u2029])%")
_MOST_DIRECTIVES = 16
"""Lines that begin with `%`. libyaml compares each directive with all earlier ones, in one call that no other thread
can interrupt: 1 MB of directives takes it half a minute."""
_STR_TAGS = {"!", "tag:yaml.org,2002:str"}


class Malformed(ValueError):
    """The text is not YAML or JSON, or uses unsupported features. The message contains the position."""


class DocumentKeys(dict[str, Value]):
    """A mapping that also stores its duplicate keys."""

    def __init__(self, pairs: list[tuple[str, Value]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.twice = tuple(dict.fromkeys(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]


def load_json(body: bytes) -> Value:
    """Parses a JSON text.

    Raises:
        Malformed: the text is not JSON, or is too deep or too large.
    """
    try:
        value = json.loads(_text(body), object_pairs_hook=DocumentKeys, parse_int=_integer, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise Malformed(f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise _too_deep() from None
    _bound(value)
    return value


def load_yaml(body: bytes) -> Value:
    """Parses a YAML text that contains one document.

    Raises:
        Malformed: the text is not YAML, uses unsupported features, or is too deep or too large.
    """
    try:
        return _Composer(_text(body)).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Malformed(f"{_where(mark)}not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise Malformed(f"not YAML: {str(error).splitlines()[0]}") from None
    except (ValueError, OverflowError) as error:
        # PyYAML's scanner raises these for some escapes, such as \U with a number beyond Unicode.
        raise error if isinstance(error, Malformed) else Malformed(f"not YAML: {error}") from None


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Malformed(f"byte {error.start}: not UTF-8") from None


def _where(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""


def _too_deep() -> Malformed:
    return Malformed(f"nested more than {MAX_DEPTH} levels deep")


def _integer(text: str) -> int | float:
    # Such a number is out of every allowed range in any case; parsing it as a float avoids quadratic time.
    return int(text) if len(text) <= _MAX_DIGITS else float(text)


def _no_constant(text: str) -> Value:
    raise Malformed(f"{text} is not a valid number in JSON")


def _bound(value: Value) -> None:
    left = [(value, 0)]
    nodes = 0
    while left:
        found, depth = left.pop()
        nodes += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        if nodes > MAX_NODES:
            raise Malformed(f"more than {MAX_NODES} values")
        if isinstance(found, dict):
            left += [(v, depth + 1) for v in found.values()]
        elif isinstance(found, list):
            left += [(v, depth + 1) for v in found]


def _plain(text: str) -> Value:
    """Returns the value of a plain (unquoted) scalar."""
    if text in _NULL:
        return None
    if text in (text.lower(), text.upper(), text.capitalize()) and text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    return float(text) if _NUMBER.fullmatch(text) else text


class _Composer:
    """Builds values from PyYAML's event stream, so that limits are checked before the rest of the text is parsed."""

    def __init__(self, text: str) -> None:
        if len(list(islice(_DIRECTIVE.finditer(text), _MOST_DIRECTIVES + 1))) > _MOST_DIRECTIVES:
            raise Malformed(f"more than {_MOST_DIRECTIVES} lines begin with %; remove the directives")
        self._events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))
        self._left = MAX_NODES

    def document(self) -> Value:
        value = None
        for number, event in enumerate(e for e in self._events if not isinstance(e, yaml.StreamStartEvent)):
            if isinstance(event, yaml.StreamEndEvent):
                break
            if number:
                raise Malformed(f"{_where(event.start_mark)}a second document; send only one document")
            value = self._node(next(self._events), 0)
            next(self._events)
        return value

    def _node(self, event: Any, depth: int) -> Value:
        where = _where(event.start_mark)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise Malformed(f"{where}anchors (&) and aliases (*) are not supported; repeat the value")
        self._left -= 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        if self._left < 0:
            raise Malformed(f"more than {MAX_NODES} values")
        tag = event.tag
        if tag is not None and not (isinstance(event, yaml.ScalarEvent) and tag in _STR_TAGS):
            raise Malformed(f"{where}tags such as {tag[:50]} are not supported; write the value without its tag")
        if isinstance(event, yaml.ScalarEvent):
            # The style of a plain scalar is None, or empty with libyaml.
            return event.value if tag is not None or event.style else _plain(event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(event, depth + 1))
            return items
        pairs = []
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            pairs.append((self._key(event), self._node(next(self._events), depth + 1)))
        return DocumentKeys(pairs)

    def _key(self, event: Any) -> str:
        where = _where(event.start_mark)
        if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
            raise Malformed(f"{where}a key must be a string")
        if event.value == "<<" and not event.style:
            raise Malformed(f"{where}merge keys (<<) are not supported; repeat the keys")
        # Keys are always strings: `NO: x` is a variable named NO, not the boolean.
        return str(event.value)
