"""The TLS certificate of a server from PEM files; renewed files are used for new connections without a restart."""

import logging
import ssl
from pathlib import Path
from typing import NoReturn

from infra.errors import ConfigurationError
from infra.files import stamp

_Stamp = tuple[tuple[int, int, int] | None, ...]
_log = logging.getLogger(__name__)


class Certificates:
    """A certificate chain and its private key, which must not be encrypted."""

    def __init__(self, chain: Path, key: Path) -> None:
        """Reads the files.

        Raises:
            ConfigurationError: a file cannot be read or is not PEM, or the key is encrypted or of another certificate.
        """
        self._chain, self._key = chain, key
        self._stamp, self._newest = self._look(), self._context()

    def context(self) -> ssl.SSLContext:
        """Returns the context of a server. Each handshake uses the newest files that are valid."""
        context = self._context()
        context.sni_callback = self._choose
        return context

    def _choose(self, connection: ssl.SSLObject, _: str, __: ssl.SSLContext) -> None:
        now = self._look()
        if now != self._stamp:
            self._stamp = now
            try:
                self._newest = self._context()
            except ConfigurationError as error:
                _log.warning("the new certificate cannot be used; the earlier one stays in use: %s", error)
        connection.context = self._newest

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path in (self._chain, self._key):
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigurationError(f"TLS: {path}: {error.strerror}") from None
        try:
            # Without a callback, OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(self._chain, self._key, password=self._encrypted)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigurationError(
                    f"TLS: the key {self._key} does not belong to the certificate {self._chain}"
                ) from None
            raise ConfigurationError(
                f"TLS: {self._chain} must contain a certificate in PEM, and {self._key} its private key ({error})"
            ) from None
        return context

    def _encrypted(self) -> NoReturn:
        raise ConfigurationError(f"TLS: {self._key} is encrypted with a password; must be a key without one")

    def _look(self) -> _Stamp:
        """Returns a value that changes when the files are replaced, or one of them is missing."""
        return stamp(self._chain), stamp(self._key)
