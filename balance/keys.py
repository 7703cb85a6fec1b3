"""The API keys that clients of a service must send, from a file of hashes."""

import re
from collections.abc import Iterable
from pathlib import Path

from balance.configuration import KEYS
from balance.runtime import RuntimeSocket, RuntimeSocketError
from infra.errors import ConfigurationError

_HASH = re.compile(r"[0-9a-f]{64}")


def read_keys(path: Path) -> tuple[str, ...]:
    """Returns the hashes in a file, sorted.

    Each line has the SHA-256 of a key in hexadecimal, and may have the name of its owner after a space. Empty lines and
    lines that begin with # are ignored.

    Raises:
        ConfigurationError: the file cannot be read, or a line has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--keys: {path}: {error}") from None
    found = set()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        digest = line.split()[0].lower()
        if not _HASH.fullmatch(digest):
            raise ConfigurationError(
                f"--keys: {path}: line {number}: {line!r}: must be the SHA-256 of a key in hexadecimal"
            )
        found.add(digest)
    return tuple(sorted(found))


class KeyFile:
    """A file of hashes that may change."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            ConfigurationError: see `read_keys`.
        """
        self._path = path
        self._seen = self._state()
        self.hashes = read_keys(path)

    def refresh(self) -> bool:
        """Reads the file again if it was changed. Returns whether the hashes differ from those before.

        Raises:
            ConfigurationError: the file was changed, but is invalid; the hashes stay.
        """
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        before, self.hashes = self.hashes, read_keys(self._path)
        return before != self.hashes

    def _state(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


async def replace_keys(runtime: RuntimeSocket, hashes: Iterable[str]) -> None:
    """Replaces the admitted keys of a running HAProxy, all at once.

    Raises:
        RuntimeSocketError: HAProxy refused a command, or did not answer.
    """
    answer = await runtime.ask(f"prepare acl {KEYS}")
    version = answer.removeprefix("New version created: ")
    if not version.isdigit():
        raise RuntimeSocketError(f"prepare acl {KEYS}: {answer}")
    for digest in hashes:
        await runtime.do(f"add acl @{version} {KEYS} {digest}")
    await runtime.do(f"commit acl @{version} {KEYS}")
