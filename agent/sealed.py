"""A machine's X25519 key, and the secrets that were sealed to it."""

import base64
import json
from collections.abc import Sequence

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


def unseal(private: Sequence[bytes], sealed: str | None) -> Secrets:
    """The secrets in `sealed` (base64), by whichever of the keys opens it; none where it is None.

    Raises:
        CannotUnseal: it is for none of these keys, or what is in it is not job to variable to value.
    """
    if sealed is None:
        return {}
    try:
        body = json.loads(_open(private, sealed))
        return {
            str(job): {str(variable): str(value) for variable, value in values.items()} for job, values in body.items()
        }
    except (CryptoError, ValueError, AttributeError):
        # The reason could quote what is inside, so none is given.
        raise CannotUnseal("the secrets of this attempt were not sealed to this machine's key") from None


def prove(machine: str, private: Sequence[bytes], challenge: str) -> str:
    """What shows that this machine holds the key that a challenge is sealed to, beside its newest, `private[0]`.

    Raises:
        CannotUnseal: it does not, or the challenge is about another key than its own.
    """
    try:
        body = json.loads(_open(private, challenge))
        # Else whoever announced itself in this machine's name would have its key accepted.
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
    raise ValueError("no key")
