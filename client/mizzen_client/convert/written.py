"""Writes documents as YAML: scripts as blocks of text, and strings quoted where mizzen's reader needs it."""

import re
from collections.abc import Iterable
from typing import Any

import yaml

from mizzen_client import yaml_core

_OTHER_BREAKS = re.compile("[\r\x85\u2028\u2029]")
"""Characters that end a line in YAML, so that a block of text would have a line end instead."""


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = yaml_core.RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:  # The API refuses anchors.
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if _OTHER_BREAKS.search(text) else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def write_documents(documents: Iterable[dict[str, Any]]) -> str:
    """Return the documents as one YAML text, with `---` between them."""
    texts = (yaml.dump(one, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110) for one in documents)
    return "---\n".join(texts)
