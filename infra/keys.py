"""Creation and hashing of API keys, the master key, and encryption of secrets."""

import base64
import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from nacl.exceptions import CryptoError
from nacl.public import PublicKey, SealedBox
from nacl.secret import SecretBox

from infra.errors import ConfigurationError

KEY_PREFIX = "mzn_"


def new_api_key() -> tuple[str, str, str]:
    """Creates an API key and returns its id, the key and the key's SHA-256 in hexadecimal. Only the hash is stored."""
    key_id = secrets.token_hex(6)
    key = f"{KEY_PREFIX}{key_id}_{secrets.token_urlsafe(32)}"
    return key_id, key, hash_api_key(key)


def hash_api_key(key: str) -> str:
    """Returns the SHA-256 of an API key in hexadecimal. A key has 256 random bits, so it needs no salt or slow hash."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_master_key(path: Path, *, create: bool = False) -> bytes:
    """Returns the 32-byte key that encrypts secrets at rest. With `create`, creates a missing file (mode 0600).

    Raises:
        ConfigurationError: the file does not exist, or does not contain 32 bytes in base64.
    """
    if create and not path.exists():
        _create_master_key(path)
    try:
        key = base64.b64decode(path.read_bytes(), validate=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"master_key: {path}: {error}") from None
    if len(key) != SecretBox.KEY_SIZE:
        raise ConfigurationError(f"master_key: {path} contains {len(key)} bytes; must be {SecretBox.KEY_SIZE} bytes")
    return key


def installation_id(path: Path) -> str:
    """Returns the installation's id, derived from the master key. It marks the installation's resources in a cloud.

    Raises:
        ConfigurationError: the master key cannot be read (`load_master_key`).
    """
    return hashlib.sha256(b"installation " + load_master_key(path)).hexdigest()[:16]


def _create_master_key(path: Path) -> None:
    """Writes a new key atomically. If several processes do this concurrently, the key of one of them is kept."""
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
    """Encrypts `value` with the master key, for storage in the database."""
    return bytes(SecretBox(master_key).encrypt(value.encode()))


def decrypt_secret(master_key: bytes, box: bytes) -> str:
    """Decrypts a value that `encrypt_secret` returned."""
    return SecretBox(master_key).decrypt(box).decode()


def key_fingerprint(public_key: str) -> str:
    """Returns a fingerprint for comparing public keys: the first 16 hexadecimal digits of the key's SHA-256."""
    return hashlib.sha256(public_key.encode()).hexdigest()[:16]


def seal_for_machine(public_key: str, body: bytes) -> str:
    """Encrypts `body` for a machine's X25519 key (base64) and returns base64. Only that machine can decrypt it.

    Raises:
        ValueError: it is not an X25519 key, or a weak one, with which encryption is impossible.
    """
    try:
        sealed = SealedBox(PublicKey(base64.b64decode(public_key))).encrypt(body)
    except (ValueError, CryptoError) as error:
        raise ValueError(f"public_key: {public_key[:64]!r}: {error}") from None
    return base64.b64encode(sealed).decode()
