"""A machine's X25519 key, and the secrets that were sealed to it."""

import base64
import json

from nacl.exceptions import CryptoError
from nacl.public import PrivateKey, SealedBox

Secrets = dict[str, dict[str, str]]
"""Job to variable to value."""


class CannotUnseal(Exception):
    """The secrets were sealed to another key than this machine's."""


def new_key() -> bytes:
    """A new private key, 32 bytes."""
    return bytes(PrivateKey.generate())


def public_key(private: bytes) -> str:
    """The public key that belongs to `private`, in base64."""
    return base64.b64encode(bytes(PrivateKey(private).public_key)).decode()


def unseal(private: bytes, sealed: str | None) -> Secrets:
    """The secrets in `sealed` (base64); none where it is None.

    Raises:
        CannotUnseal: it is not for this key, or what is in it is not job to variable to value.
    """
    if sealed is None:
        return {}
    try:
        body = json.loads(SealedBox(PrivateKey(private)).decrypt(base64.b64decode(sealed)))
        return {
            str(job): {str(variable): str(value) for variable, value in values.items()} for job, values in body.items()
        }
    except (CryptoError, ValueError, AttributeError):
        # The reason could quote what is inside, so none is given.
        raise CannotUnseal("the secrets of this attempt were not sealed to this machine's key") from None
