"""API keys and the master key: made, stored as hashes, and used to seal secrets."""

import base64
import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from nacl.public import PublicKey, SealedBox
from nacl.secret import SecretBox

from infra.errors import ConfigurationError

KEY_PREFIX = "mzn_"


def new_api_key() -> tuple[str, str, str]:
    """A new key: (id, the key itself, SHA-256 of the key in hex). Only the hash is ever stored."""
    key_id = secrets.token_hex(6)
    key = f"{KEY_PREFIX}{key_id}_{secrets.token_urlsafe(32)}"
    return key_id, key, hash_api_key(key)


def hash_api_key(key: str) -> str:
    """SHA-256 in hex. Keys carry 256 random bits, so a fast hash is enough and no salt is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_master_key(path: Path, *, create: bool = False) -> bytes:
    """The 32-byte key that encrypts secrets at rest. With `create`, one is made if there is none (mode 0600).

    Raises:
        ConfigurationError: there is no such file, or it does not hold 32 bytes in base64.
    """
    if create and not path.exists():
        _create_master_key(path)
    try:
        key = base64.b64decode(path.read_bytes(), validate=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"master_key: {path}: {error}") from None
    if len(key) != SecretBox.KEY_SIZE:
        raise ConfigurationError(f"master_key: {path} holds {len(key)} bytes, it must hold {SecretBox.KEY_SIZE}")
    return key


def installation_id(path: Path) -> str:
    """What tells this installation from others, such as in the tags of a cloud: it follows from the master key.

    Raises:
        ConfigurationError: as `load_master_key`.
    """
    return hashlib.sha256(b"installation " + load_master_key(path)).hexdigest()[:16]


def _create_master_key(path: Path) -> None:
    """Writes a new key, as a whole; another process that does the same at once wins or loses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(secrets.token_bytes(SecretBox.KEY_SIZE)))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()


def encrypt_secret(master_key: bytes, value: str) -> bytes:
    """`value` as it is stored."""
    return bytes(SecretBox(master_key).encrypt(value.encode()))


def decrypt_secret(master_key: bytes, box: bytes) -> str:
    """What `encrypt_secret` was given."""
    return SecretBox(master_key).decrypt(box).decode()


def key_fingerprint(public_key: str) -> str:
    """How people compare keys: 16 hexadecimal digits of a public key's SHA-256."""
    return hashlib.sha256(public_key.encode()).hexdigest()[:16]


def seal_for_machine(public_key: str, body: bytes) -> str:
    """`body` sealed to a machine's X25519 key (base64), in base64: only its agent can open it."""
    box = SealedBox(PublicKey(base64.b64decode(public_key)))
    return base64.b64encode(box.encrypt(body)).decode()
