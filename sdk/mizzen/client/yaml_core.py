"""YAML as the API reads it, so that a document means the same whoever reads it.

Of plain scalars only null, truth values and decimal numbers are not strings: a date, a time of day and `010` stay what
they look like. Keys are strings whatever they look like, and none may be given twice. Anchors and merge keys, which the
API refuses, are resolved here.
"""

import re
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_WORDS = "yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF"


class NotYaml(ValueError):
    """The text is not YAML. The message says what and starts with `:line:column: `, or `: ` where that is unknown."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain text", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
            if key.tag != f"{_TAG}merge":
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


def load_all(text: str) -> list[Any]:
    """The values of all documents in `text`.

    Raises:
        NotYaml: it is not YAML, or a mapping has a key twice.
    """
    try:
        return list(yaml.load_all(text, _Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise NotYaml(f"{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise NotYaml(f": not YAML or JSON: {error}") from None
