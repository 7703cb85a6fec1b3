"""The certificate of a service, from a file that may change."""

import re
import ssl
from pathlib import Path

from infra.errors import ConfigurationError
from infra.files import write_private
from proxies.balance.configuration import CERTIFICATE
from proxies.balance.runtime import RuntimeSocket
from proxies.balance.watched_file import WatchedFile

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
