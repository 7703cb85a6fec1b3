"""Writes documents as YAML: scripts as blocks of text, and strings quoted where mizzen's reader needs it."""

from collections.abc import Iterable
from typing import Any

import yaml

from mizzen.client import yaml_core


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = yaml_core.RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:  # The API refuses anchors.
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def write_documents(documents: Iterable[dict[str, Any]]) -> str:
    """Return the documents as one YAML text, with `---` between them."""
    texts = (yaml.dump(one, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110) for one in documents)
    return "---\n".join(texts)
