"""The files of the balancer: its folder's lock, the certificate and the keys of clients, which it watches."""

import fcntl
import logging
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from infra.errors import ConfigurationError, StackError
from infra.files import stamp, write_private
from proxies.balance.configuration import CERTIFICATE, KEYS, Access
from proxies.balance.runtime import RuntimeSocket, RuntimeSocketError

_log = logging.getLogger(__name__)


class WatchedFile:
    """A file that may be replaced or rewritten. Its path may lead through symbolic links, which may change as well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = stamp(path)

    def has_changed(self) -> bool:
        """Returns whether the file differs from that of the last call, or of the start."""
        before, self._seen = self._seen, stamp(self.path)
        return before != self._seen


_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
_LARGEST_BYTES = 16_000
"""The longest command to HAProxy: its buffer has 16 KiB."""


class CertificateFile:
    """A PEM file with a certificate, its chain and the private key. HAProxy reads a copy in its working folder.

    The copy always is a certificate that HAProxy has accepted, so that a restarted HAProxy accepts it as well.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        """Reads the file and writes the copy into `folder`.

        Raises:
            ConfigurationError: the file cannot be read, or has no certificate with its private key.
        """
        self._file = WatchedFile(path)
        self._copy = folder / CERTIFICATE
        self._accepted = self._read()
        self._wanted = self._accepted
        write_private(self._copy, self._accepted)

    async def refresh(self, runtime: RuntimeSocket) -> bool:
        """Replaces the certificate of a running HAProxy if the file has changed. Connections continue.

        Returns whether it was replaced.

        Raises:
            ConfigurationError: the file was changed, but HAProxy cannot use it; the certificate stays. The error is
                raised once for each change.
            RuntimeSocketError: HAProxy does not answer. The next call tries again.
        """
        if self._file.has_changed():
            self._wanted = self._accepted  # An invalid file also takes back a change before it.
            self._wanted = self._read()
            if len(self._wanted) > _LARGEST_BYTES:
                size, self._wanted = len(self._wanted), self._accepted
                raise ConfigurationError(
                    f"--cert: {self._file.path}: has {size} bytes; a running HAProxy accepts at most {_LARGEST_BYTES},"
                    " so this certificate needs a restart of the balancer"
                )
        if self._wanted == self._accepted:
            return False
        answer = await runtime.ask(f"set ssl cert {CERTIFICATE} <<\n{self._wanted}")
        if answer.startswith("Transaction"):
            answer = await runtime.ask(f"commit ssl cert {CERTIFICATE}")
        if not answer.endswith("Success!"):
            await runtime.ask(f"abort ssl cert {CERTIFICATE}")
            self._wanted = self._accepted
            raise ConfigurationError(f"--cert: {self._file.path}: HAProxy refuses it: {' '.join(answer.split())}")
        self._accepted = self._wanted
        write_private(self._copy, self._accepted)
        return True

    def _read(self) -> str:
        """Returns the PEM blocks of the file."""
        path = self._file.path
        try:
            text = path.read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise ConfigurationError(f"--cert: {path}: {error.strerror}") from None
        # An empty line, which may be between two blocks, would end the command.
        pem = "".join(f"{block[0]}\n" for block in _BLOCK.finditer(text.replace("\r\n", "\n")))
        candidate = self._copy.with_suffix(".new")
        write_private(candidate, pem)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(candidate, password="")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None)
            detail = f" ({reason.lower().replace('_', ' ')})" if reason else ""
            raise ConfigurationError(
                f"--cert: {path}: must have PEM blocks of a certificate and its private key without passphrase{detail}"
            ) from None
        finally:
            candidate.unlink()
        return pem


_HASH = re.compile(r"[0-9a-f]{64}")
_OWNER = re.compile(r"[A-Za-z0-9._@-]{1,100}")
_FORM = "must be the SHA-256 of a key in hexadecimal, and may be followed by the name of its owner"
NO_OWNER = "-"
"""Placeholder for the owner of a key without a name. HAProxy also logs it for a request without a key."""


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


OWN_CERTIFICATE = "own.pem"
"""The service's own certificate: a line with its name, and the PEM text."""


class AccessFiles:
    """The certificate and the keys of one service, as HAProxy uses them."""

    def __init__(self, service: str, folder: Path, certificate: Path | None, keys: Path | None) -> None:
        """Reads the files; None: clients do not use TLS, or need no key. `folder` is HAProxy's working folder.

        Raises:
            ConfigurationError: a file cannot be used.
        """
        self._service, self._folder = service, folder
        self._keys = KeyFile(keys) if keys else None
        self._certificate = CertificateFile(certificate, folder) if certificate else None
        self._is_given = certificate is not None
        self._own = folder / OWN_CERTIFICATE
        self._keys_due = False

    @property
    def has_tls(self) -> bool:
        """Whether clients must use TLS."""
        return self._certificate is not None

    def needs(self, certificate: str | None) -> bool:
        """Returns whether `use` needs the PEM text of the service's certificate with this name."""
        if certificate is None or self._is_given:
            return False
        try:
            return self._own.read_text().partition("\n")[0] != certificate
        except OSError:
            return True

    def use(self, certificate: str | None, pem: str | None = None) -> None:
        """Uses the service's own certificate for clients, unless another one was given at the start.

        Args:
            certificate: its name; None: the service has none, so clients do not use TLS.
            pem: its PEM text with the private key; None: the folder has it.

        Raises:
            ConfigurationError: there is no certificate with its private key.
        """
        if self._is_given:
            return
        if certificate is None:
            self._certificate = None
            return
        if pem is not None:
            write_private(self._own, f"{certificate}\n{pem}")
        if self._certificate is None:  # Otherwise `refresh` finds the changed file.
            self._certificate = CertificateFile(self._own, self._folder)

    def access(self, trusted_proxies: tuple[str, ...]) -> Access:
        """Returns which clients are admitted, for HAProxy's configuration."""
        return Access(self._certificate is not None, self._keys is not None, trusted_proxies)

    def write(self) -> None:
        """Writes the map of keys for a HAProxy that is about to start."""
        if self._keys is not None:
            lines = (f"{digest} {owner}\n" for digest, owner in self._keys.owners.items())
            write_private(self._folder / KEYS, "".join(lines))

    async def refresh(self, runtime: RuntimeSocket) -> None:
        """Replaces the keys and the certificate of a running HAProxy if their files have changed.

        Raises:
            RuntimeSocketError: HAProxy refused a command, or did not answer. The next call tries again.
        """
        await self._refresh_keys(runtime)
        await self._refresh_certificate(runtime)

    async def _refresh_keys(self, runtime: RuntimeSocket) -> None:
        if self._keys is None:
            return
        try:
            self._keys_due |= self._keys.refresh()
        except ConfigurationError as error:
            _log.warning("%s: the keys stay as they were: %s", self._service, error)
            return
        if self._keys_due:  # Until HAProxy has accepted them: a revoked key must not stay admitted.
            await replace_keys(runtime, self._keys.owners)
            self._keys_due = False

    async def _refresh_certificate(self, runtime: RuntimeSocket) -> None:
        if self._certificate is None:
            return
        try:
            if await self._certificate.refresh(runtime):
                _log.info("%s: clients get the new certificate", self._service)
        except ConfigurationError as error:
            _log.warning("%s: the certificate stays as it was: %s", self._service, error)


def locked(folder: Path) -> IO[bytes]:
    """Returns the open lock file of a folder, which stays locked until the process ends.

    Raises:
        StackError: another balancer uses the folder.
    """
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StackError(f"--data: {folder} is used by another balancer: every balancer needs its own folder") from None
    return file
