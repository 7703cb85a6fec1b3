"""Contexts: named URLs and keys of APIs, in `~/.config/mizzen/config.yaml` (or under `XDG_CONFIG_HOME`).

    current: lab
    contexts:
      lab:
        api: http://127.0.0.1:8080
        key: mzn_...
        ca: /etc/mizzen/ca.crt    # optional

The file holds keys, so it is written with mode 0600. It is replaced atomically.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mizzen_client.errors import NotConfigured, Unreachable

if TYPE_CHECKING:
    from mizzen_client.device import Login

API_VARIABLE = "MIZZEN_API"
CA_VARIABLE = "MIZZEN_API_CA"
KEY_VARIABLE = "MIZZEN_API_KEY"
CONTEXT_VARIABLE = "MIZZEN_CONTEXT"


@dataclass(frozen=True)
class Context:
    """The URL and the key of an API."""

    api: str
    key: str | None = field(default=None, repr=False)
    ca: str | None = None
    """PEM file with certificates of authorities that the client trusts in addition to the system's."""
    login: "Login | None" = field(default=None, repr=False)
    """Tokens of an OIDC issuer, instead of a key."""

    @property
    def credential(self) -> "str | Callable[[], str] | None":
        """The key, or a function that returns a valid token."""
        return self.key if self.login is None or self.key else partial(_token, self)


@dataclass(frozen=True)
class Contexts:
    """All contexts, and the name of the current one."""

    current: str | None = None
    named: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """Return the context `name`.

        Raises:
            NotConfigured: there is no context of that name.
        """
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none; `mizzen login` creates one"
            raise NotConfigured(f"there is no context {name!r} in {config_path()}; available contexts: {known}")
        return self.named[name]

    def with_context(self, name: str, context: Context) -> "Contexts":
        """Return a copy in which the context `name` is added or replaced and is the current one."""
        return Contexts(name, {**self.named, name: context})

    def without(self, name: str) -> "Contexts":
        """Return a copy without the context `name`. If it was the current one, the copy has no current context."""
        self.get(name)
        named = {other: context for other, context in self.named.items() if other != name}
        return Contexts(None if self.current == name else self.current, named)

    def using(self, name: str) -> "Contexts":
        """Return a copy in which `name` is the current context."""
        self.get(name)
        return replace(self, current=name)


def config_path() -> Path:
    """Return the path of the file of contexts.

    Raises:
        NotConfigured: this user has no home folder.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(base).expanduser() / "mizzen" / "config.yaml"
    except RuntimeError:
        raise NotConfigured(
            "this user has no home folder for contexts: set HOME, or MIZZEN_API and MIZZEN_API_KEY"
        ) from None


def load_contexts() -> Contexts:
    """Read the saved contexts. Without a file there are none.

    Raises:
        NotConfigured: the file cannot be read or is invalid.
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
    key, ca = (None if (value := entry.get(name)) is None else str(value) for name in ("key", "ca"))
    login = entry.get("login")
    if login is None:
        return Context(entry["api"], key, ca)
    from mizzen_client.device import Login

    try:
        return Context(entry["api"], key, ca, Login(**login))
    except TypeError:
        raise NotConfigured(f"{path}: contexts.{name}.login: is damaged; run `mizzen login` again") from None


def _body(context: Context) -> dict[str, Any]:
    body = {name: value for name, value in vars(context).items() if value is not None}
    return body if context.login is None else body | {"login": vars(context.login)}


def _token(context: Context) -> str:
    """Return the token of a login, renewed if it expires soon. Other processes use the renewed one.

    Raises:
        NotConfigured: it cannot be renewed.
        Unreachable: the issuer does not answer.
    """
    import fcntl

    from mizzen_client.device import renew

    path = config_path()
    # Only one process renews: many issuers accept a refresh token once.
    with path.with_name(".config.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        contexts = load_contexts()
        for name, saved in contexts.named.items():
            if saved.api == context.api and saved.login is not None:
                if saved.login.is_fresh:
                    return saved.login.token
                try:
                    login = renew(saved.login, saved.ca)
                except Unreachable:
                    if time.time() < saved.login.expires_at_s:
                        return saved.login.token
                    raise
                save_contexts(replace(contexts, named={**contexts.named, name: replace(saved, login=login)}))
                return login.token
    raise NotConfigured(f"the login at {context.api} was removed; run `mizzen login` again")


def save_contexts(contexts: Contexts) -> Path:
    """Write the file of contexts and return its path.

    Raises:
        NotConfigured: the file cannot be written.
    """
    path = config_path()
    try:
        _write(path, contexts)
    except OSError as error:
        raise NotConfigured(
            f"{path}: {error.strerror}: set XDG_CONFIG_HOME to a folder that you may write, or, instead of"
            f" `mizzen login`, {API_VARIABLE} and {KEY_VARIABLE}"
        ) from None
    return path


def _write(path: Path, contexts: Contexts) -> None:
    import tempfile

    import yaml

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    body = {
        "current": contexts.current,
        "contexts": {name: _body(context) for name, context in sorted(contexts.named.items())},
    }
    # mkstemp creates the file with mode 0600, so other users can never read the keys, not even during the write.
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


def active_context(name: str | None = None) -> Context:
    """Return the context to use: `name`, else `MIZZEN_API` (with `MIZZEN_API_KEY`), else `MIZZEN_CONTEXT`, else the
    current one. If only `MIZZEN_API_KEY` or `MIZZEN_API_CA` is set, it replaces the key or the file of the context.

    Raises:
        NotConfigured: none of these is set, or there is no context of that name.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    ca = os.environ.get(CA_VARIABLE) or None
    api = os.environ.get(API_VARIABLE)
    if name is None and api:
        return Context(api, key, ca)
    contexts = load_contexts()
    chosen = name or os.environ.get(CONTEXT_VARIABLE) or contexts.current
    if not chosen:
        raise NotConfigured(f"no API is configured: run `mizzen login URL`, or set {API_VARIABLE} and {KEY_VARIABLE}")
    context = contexts.get(chosen)
    if name is not None:
        return context
    return replace(context, key=key or context.key, ca=ca or context.ca)
