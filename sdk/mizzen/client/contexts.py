"""Contexts: named addresses and keys of APIs, in `~/.config/mizzen/config.yaml` (or under `XDG_CONFIG_HOME`).

    current: lab
    contexts:
      lab:
        api: http://127.0.0.1:8080
        key: mzn_...

The file holds keys: it is written with mode 0600, whole or not at all.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mizzen.client.errors import NotConfigured

API_VARIABLE = "MIZZEN_API"
KEY_VARIABLE = "MIZZEN_API_KEY"
CONTEXT_VARIABLE = "MIZZEN_CONTEXT"


@dataclass(frozen=True)
class Context:
    """Where an API is and the key to use there."""

    api: str
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Contexts:
    """All contexts, and the name of the one in use."""

    current: str | None = None
    named: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """The context `name`.

        Raises:
            NotConfigured: there is none of that name.
        """
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none yet; `mizzen login` makes one"
            raise NotConfigured(f"there is no context {name!r} in {config_path()}; there are: {known}")
        return self.named[name]

    def with_context(self, name: str, context: Context) -> "Contexts":
        """These contexts with `name` added or replaced, and in use."""
        return Contexts(name, {**self.named, name: context})

    def without(self, name: str) -> "Contexts":
        """These contexts without `name`; if it was in use, none is."""
        self.get(name)
        named = {other: context for other, context in self.named.items() if other != name}
        return Contexts(None if self.current == name else self.current, named)

    def using(self, name: str) -> "Contexts":
        """These contexts with `name` in use."""
        self.get(name)
        return replace(self, current=name)


def config_path() -> Path:
    """Where the contexts are."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "mizzen" / "config.yaml"


def load_contexts() -> Contexts:
    """The saved contexts; none if there is no file.

    Raises:
        NotConfigured: the file cannot be read or has another form.
    """
    import yaml

    path = config_path()
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Contexts()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise NotConfigured(f"{path}: {error}") from None
    body = {} if body is None else body
    named = body.get("contexts") or {} if isinstance(body, dict) else None
    if not isinstance(named, dict):
        raise NotConfigured(f"{path}: expected the keys `current` and `contexts`; repair or delete it")
    return Contexts(body.get("current"), {str(name): _context(path, name, entry) for name, entry in named.items()})


def _context(path: Path, name: object, entry: Any) -> Context:
    if not isinstance(entry, dict) or not isinstance(entry.get("api"), str):
        raise NotConfigured(f"{path}: contexts.{name}: expected a mapping with `api`, a URL, and `key`")
    key = entry.get("key")
    return Context(entry["api"], None if key is None else str(key))


def save_contexts(contexts: Contexts) -> Path:
    """Writes the file of contexts and returns its path."""
    import tempfile

    import yaml

    path = config_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    body = {
        "current": contexts.current,
        "contexts": {name: {"api": c.api, "key": c.key} for name, c in sorted(contexts.named.items())},
    }
    # mkstemp makes the file with mode 0600: the keys are never readable by others, not even while it is written.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".config-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yaml.safe_dump(body, file, sort_keys=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def active_context(name: str | None = None) -> Context:
    """The context to use: `name` if given, else `MIZZEN_API` (and `MIZZEN_API_KEY`), else `MIZZEN_CONTEXT`, else the
    one in use. `MIZZEN_API_KEY` alone replaces the context's key.

    Raises:
        NotConfigured: none of them is there.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    api = os.environ.get(API_VARIABLE)
    if name is None and api:
        return Context(api, key)
    contexts = load_contexts()
    chosen = name or os.environ.get(CONTEXT_VARIABLE) or contexts.current
    if not chosen:
        raise NotConfigured(f"no API is known: run `mizzen login URL`, or set {API_VARIABLE} and {KEY_VARIABLE}")
    context = contexts.get(chosen)
    return replace(context, key=key) if key and name is None else context
