"""The file with the keys that encrypt payloads in Temporal: of an installation, or of one machine's agent.

Each line is `ID KEY`, or `ID KEY MACHINE` in the file of a machine: the key's id, 32 bytes in base64, and the machine.
The newest key is first, and encrypts; the others only decrypt. Payloads to or from the agent of a machine are encrypted
with a key that is derived from the installation's key for this machine, so that the agent needs no other key.
"""

import base64
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from domain.ids import MACHINE_PATTERN, MACHINE_RULE
from infra.errors import ConfigurationError, MizzenError
from infra.files import stamp, write_private

_KEY_BYTES = 32
_ID = re.compile(r"[0-9a-f]{16}")
_LOOK_S = 1.0
"""Interval at which a process that encrypts checks whether the file has changed."""


class UnknownKey(MizzenError):
    """A payload was encrypted with a key that is not in the file."""


@dataclass(frozen=True)
class PayloadKey:
    """One line of the file. `machine`: the machine that the key is for; None: it is the installation's."""

    id: str
    key: bytes
    machine: str | None = None

    def of_machine(self, machine: str) -> "PayloadKey":
        """Returns the key of a machine, which is derived from this key of the installation."""
        info = b"mizzen payloads of machine " + machine.encode()
        return PayloadKey(self.id, HKDF(SHA256(), _KEY_BYTES, None, info).derive(self.key), machine)

    def line(self) -> str:
        """Returns the line of the file."""
        words = (self.id, base64.b64encode(self.key).decode(), self.machine)
        return " ".join(word for word in words if word is not None)


def read_keys(path: Path) -> list[PayloadKey]:
    """Returns the keys in a file, the newest first.

    Raises:
        ConfigurationError: the file cannot be read or contains no key, or a line is not a key.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"payload_keys: {path}: {error}") from None
    found = [_parsed(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigurationError(f"payload_keys: {path} contains no key; create one with `mizzen payload-keys rotate`")
    if len({key.machine for key in found}) > 1:
        raise ConfigurationError(f"payload_keys: {path} must have keys of the installation or of one machine, not both")
    return found


def add_key(path: Path) -> PayloadKey:
    """Adds a new key as the first line of a file, which is created (mode 0600) if it is missing. Returns the key.

    Raises:
        ConfigurationError: the file exists and is damaged, or is one of a machine.
    """
    old = read_keys(path) if path.exists() else []
    if old and old[0].machine is not None:
        raise ConfigurationError(f"payload_keys: {path} has the keys of machine {old[0].machine}; rotate those of the"
                                 " installation, and give the machine its new ones")  # fmt: skip
    new = PayloadKey(secrets.token_hex(8), secrets.token_bytes(_KEY_BYTES))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, "".join(f"{key.line()}\n" for key in (new, *old)))
    return new


def machine_lines(path: Path, machine: str) -> str:
    """Returns the content of the file of a machine, from the installation's file.

    Raises:
        ConfigurationError: the file is unusable or one of a machine, or `machine` is not the id of a machine.
    """
    if not re.fullmatch(MACHINE_PATTERN, machine):
        raise ConfigurationError(f"machine {machine!r}: must be {MACHINE_RULE}")
    keys = read_keys(path)
    if keys[0].machine is not None:
        raise ConfigurationError(f"payload_keys: {path} has the keys of machine {keys[0].machine}; must be the file of"
                                 " the installation")  # fmt: skip
    return "".join(f"{key.of_machine(machine).line()}\n" for key in keys)


class PayloadKeys:
    """The keys in a file. A changed file is read again, so a rotation needs no restart. For one thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigurationError like `read_keys`."""
        self._path, self._clock = path, clock
        self._looked_s, self._stamp = clock(), stamp(path)
        self._keys = read_keys(path)
        self._ciphers: dict[tuple[str, str | None], AESGCM] = {}

    def newest(self, machine: str | None) -> tuple[PayloadKey, AESGCM]:
        """Returns the key that encrypts payloads for a machine's agent, or for the installation, and its cipher.

        The file of a machine has one key for both.
        """
        if self._clock() - self._looked_s >= _LOOK_S:
            self._look()
        own = self._keys[0]
        key = own if own.machine is not None or machine is None else own.of_machine(machine)
        return key, self._cipher(key.id, key.machine, own)

    def cipher(self, id_: str, machine: str | None) -> AESGCM:
        """Returns the cipher for a payload that was encrypted with the key `id_` of a machine or the installation.

        Raises:
            UnknownKey: the file does not contain this key.
        """
        for is_last in (False, True):
            for own in self._keys:
                if own.id == id_ and own.machine in (None, machine):
                    return self._cipher(id_, machine, own)
            if not is_last:
                self._look()
        whose = "the installation" if machine is None else f"machine {machine}"
        raise UnknownKey(f"payload_keys: {self._path} does not contain key {id_} of {whose}")

    def _cipher(self, id_: str, machine: str | None, own: PayloadKey) -> AESGCM:
        found = self._ciphers.get((id_, machine))
        if found is None:
            key = own if own.machine == machine else own.of_machine(machine or "")
            found = self._ciphers[id_, machine] = AESGCM(key.key)
        return found

    def _look(self) -> None:
        """Reads the file again if it has changed. The earlier keys stay in use if it cannot be read."""
        self._looked_s = self._clock()
        now = stamp(self._path)
        if now is None or now == self._stamp:
            return
        self._stamp = now
        try:
            self._keys = read_keys(self._path)
        except ConfigurationError:
            return
        self._ciphers.clear()


def _parsed(path: Path, number: int, line: str) -> PayloadKey:
    words = line.split()
    try:
        id_, key = words[0], base64.b64decode(words[1], validate=True)
        if _ID.fullmatch(id_) and len(key) == _KEY_BYTES and len(words) <= 3:
            return PayloadKey(id_, key, words[2] if len(words) == 3 else None)
    except (IndexError, ValueError):
        pass
    raise ConfigurationError(
        f"payload_keys: {path} line {number}: must be ID KEY or ID KEY MACHINE: 16 hexadecimal digits, and {_KEY_BYTES}"
        " bytes in base64"
    )
