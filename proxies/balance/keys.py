"""The API keys that clients of a service must send, from a file of hashes."""

import re
from collections.abc import Mapping
from pathlib import Path

from infra.errors import ConfigurationError
from proxies.balance.configuration import KEYS
from proxies.balance.runtime import RuntimeSocket, RuntimeSocketError
from proxies.balance.watched_file import WatchedFile

_HASH = re.compile(r"[0-9a-f]{64}")
_OWNER = re.compile(r"[A-Za-z0-9._@-]{1,100}")
_FORM = "must be the SHA-256 of a key in hexadecimal, and may be followed by the name of its owner"
NO_OWNER = "-"
"""Stands for the owner of a key without a name. HAProxy also logs it for a request without a key."""


def read_keys(path: Path) -> dict[str, str]:
    """Returns the hashes in a file, sorted, each with the name of the key's owner.

    Each line has the SHA-256 of a key in hexadecimal, and may have the name of its owner after a space: letters,
    digits, `.`, `_`, `@` and `-`. Empty lines and lines that begin with # are ignored.

    Raises:
        ConfigurationError: the file cannot be read, or a line has another form, or a key has two owners.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--keys: {path}: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        place = f"--keys: {path}: line {number}: {line!r}"
        digest, *rest = line.split()
        digest, owner = digest.lower(), rest[0] if rest else NO_OWNER
        if len(rest) > 1 or not _HASH.fullmatch(digest):
            raise ConfigurationError(f"{place}: {_FORM}")
        if not _OWNER.fullmatch(owner):
            raise ConfigurationError(f"{place}: owner {owner!r}: must have letters, digits, '.', '_', '@' and '-' only")
        if found.setdefault(digest, owner) != owner:
            raise ConfigurationError(f"{place}: the key has the owner {found[digest]!r} in a line before")
    return dict(sorted(found.items()))


class KeyFile:
    """A file of hashes that may change."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            ConfigurationError: see `read_keys`.
        """
        self._file = WatchedFile(path)
        self.owners = read_keys(path)
        """The owner of each key, by the key's hash."""

    def refresh(self) -> bool:
        """Reads the file again if it was changed. Returns whether the keys or owners differ from those before.

        Raises:
            ConfigurationError: the file was changed, but is invalid; the keys stay.
        """
        if not self._file.has_changed():
            return False
        before, self.owners = self.owners, read_keys(self._file.path)
        return before != self.owners


async def replace_keys(runtime: RuntimeSocket, owners: Mapping[str, str]) -> None:
    """Replaces the admitted keys of a running HAProxy, all at once.

    Raises:
        RuntimeSocketError: HAProxy refused a command, or did not answer.
    """
    answer = await runtime.ask(f"prepare map {KEYS}")
    version = answer.removeprefix("New version created: ")
    if not version.isdigit():
        raise RuntimeSocketError(f"prepare map {KEYS}: {answer}")
    for digest, owner in owners.items():
        await runtime.do(f"add map @{version} {KEYS} {digest} {owner}")
    await runtime.do(f"commit map @{version} {KEYS}")
