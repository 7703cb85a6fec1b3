"""A machine's X25519 key, and the decryption of secrets that were encrypted for it as sealed boxes."""

import base64
import json
from collections.abc import Sequence

from nacl.exceptions import CryptoError
from nacl.public import PrivateKey, SealedBox

Secrets = dict[str, dict[str, str]]
"""Secret values by job and environment variable."""


class CannotUnseal(Exception):
    """The secrets were encrypted for another key than this machine's."""


def new_key() -> bytes:
    """Returns a new private key of 32 bytes."""
    return bytes(PrivateKey.generate())


def public_key(private: bytes) -> str:
    """Returns the public key of the private key `private`, in base64."""
    return base64.b64encode(bytes(PrivateKey(private).public_key)).decode()


def unseal(private: Sequence[bytes], sealed: str | None) -> Secrets:
    """Decrypts the secrets in `sealed` (base64) with the first of the keys that fits. Returns {} if `sealed` is None.

    Raises:
        CannotUnseal: none of the keys fits, or the content does not map jobs to variables and values.
    """
    if sealed is None:
        return {}
    try:
        body = json.loads(_open(private, sealed))
        return {
            str(job): {str(variable): str(value) for variable, value in values.items()} for job, values in body.items()
        }
    except (CryptoError, ValueError, AttributeError):
        # The cause is dropped, because its message could quote a secret.
        raise CannotUnseal("the secrets of this attempt cannot be decrypted with this machine's keys") from None


def open_sealed(private: Sequence[bytes], sealed: str) -> bytes:
    """Decrypts `sealed` (base64) with the first of the keys that fits.

    Raises:
        CannotUnseal: none of the keys fits.
    """
    try:
        return _open(private, sealed)
    except (CryptoError, ValueError):
        raise CannotUnseal(
            "the sealed value cannot be opened with the keys of this machine: it was sealed for another key"
        ) from None


def prove(machine: str, private: Sequence[bytes], challenge: str) -> str:
    """Returns the proof in `challenge`, which shows that this machine holds the key that the challenge is sealed to.

    The challenge also names the machine and its newest key, `private[0]`.

    Raises:
        CannotUnseal: none of the keys opens the challenge, or it names another machine or key.
    """
    try:
        body = json.loads(_open(private, challenge))
        # Without this check, another machine could register under this machine's name and get its own key accepted.
        if (body["machine"], body["key"]) == (machine, public_key(private[0])):
            return str(body["proof"])
    except (CryptoError, ValueError, KeyError, TypeError):
        pass
    raise CannotUnseal("the challenge is not for this machine's keys")


def _open(private: Sequence[bytes], sealed: str) -> bytes:
    box = base64.b64decode(sealed)
    for number, key in enumerate(private):
        try:
            return SealedBox(PrivateKey(key)).decrypt(box)
        except CryptoError:
            if number == len(private) - 1:
                raise
    raise ValueError("no private key was given")
