"""Reads YAML by the same rules as the API, so that a document has the same meaning for the client and the API.

Only null, booleans and decimal numbers are parsed into other types; all other plain scalars are strings, such as a
date, a time of day or `010`. Keys are always strings, and duplicate keys are errors. Anchors and merge keys, which the
API rejects, are resolved here.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import yaml

T = TypeVar("T")

_TAG = "tag:yaml.org,2002:"
MERGE_TAG = f"{_TAG}merge"
_WORDS = "yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF"


class NotYaml(ValueError):
    """The text is not valid YAML. The message starts with `:line:column: `, or with `: ` if the position is unknown."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a scalar", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            seen.add(key.value)
            if key.tag != MERGE_TAG:
                key.tag = f"{_TAG}str"
        return node


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", _WORDS, [*"yYnNtTfFoO"]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", [*"-+0123456789"]),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("merge", "<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), _first)


RESOLVERS = _Loader.yaml_implicit_resolvers
"""The plain scalars that are not strings, for a writer that must quote such strings."""


def load_all(text: str) -> list[Any]:
    """Parse all documents in `text`.

    Raises:
        NotYaml: the text is not YAML, or a mapping has a duplicate key.
    """
    return _checked(lambda: list(yaml.load_all(text, _Loader)))


def compose_all(text: str) -> list[yaml.Node]:
    """Parse all documents in `text` to nodes, which have positions. An alias is the node to which it refers.

    Raises:
        NotYaml: as for `load_all`.
    """
    return _checked(lambda: list(yaml.compose_all(text, _Loader)))


def scalar(node: yaml.Node) -> Any:
    """Return the value of a scalar node.

    Raises:
        NotYaml: the node has a tag that does not match its text, or an unknown one.
    """
    return _checked(lambda: _Loader("").construct_object(node))


def _checked(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise NotYaml(f"{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise NotYaml(f": not YAML or JSON: {error}") from None
