"""Encryption of payloads in Temporal: AES-256-GCM, with the id of the key in the payload's metadata.

Temporal stores only encrypted arguments, results, heartbeats, memos, summaries and failure texts. Ids of workflows,
types, queues and search attributes stay readable, because Temporal works with them.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cryptography.exceptions import InvalidTag
from google.protobuf.message import DecodeError, Message
from temporalio.api.common.v1 import Payload
from temporalio.api.failure.v1 import Failure
from temporalio.converter import (
    ActivitySerializationContext,
    PayloadCodec,
    SerializationContext,
    WithSerializationContext,
)

from domain.ids import agent_queue, machine_of_queue
from infra.errors import MizzenError
from infra.payload_keys import PayloadKeys, UnknownKey

ENCODING = b"binary/encrypted"
_KEY_ID, _MACHINE = "mizzen-key", "mizzen-machine"
_NONCE_BYTES = 12
_log = logging.getLogger(__name__)
_HIDDEN = "Encoded failure"
"""The placeholder that the SDK writes for the message of a failure whose texts are encrypted."""


class CannotDecrypt(MizzenError):
    """A payload was damaged, or was not encrypted with one of the keys."""


class PlainCodec(PayloadCodec):
    """Codec of a process without keys: it encrypts nothing, and cannot read payloads that others have encrypted."""

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Returns the payloads."""
        return list(payloads)

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Returns the payloads.

        Raises:
            UnknownKey: a payload is encrypted. The error is also logged, because a worker reports it only to its
                caller.
        """
        if any(payload.metadata.get("encoding") == ENCODING for payload in payloads):
            error = UnknownKey(
                "temporal.payload_keys: is not set, and the payloads in Temporal are encrypted; must be a file with"
                " keys of the installation or of this machine (`mizzen payload-keys`)"
            )
            _log.error("%s", error)
            raise error
        return list(payloads)


class EncryptingCodec(PayloadCodec, WithSerializationContext):
    """Encrypts payloads for the installation, or for the machine of an activity's queue; decrypts both kinds.

    Payloads that are not encrypted are returned unchanged: encryption can be turned on while workflows run.
    """

    def __init__(self, keys: PayloadKeys, machine: str | None = None) -> None:
        """`machine`: the machine whose agent sends or receives the payloads; None: no agent is involved."""
        self._keys, self._machine = keys, machine

    def with_context(self, context: SerializationContext) -> "EncryptingCodec":
        """Returns the codec for an activity or a workflow."""
        queue = context.activity_task_queue if isinstance(context, ActivitySerializationContext) else None
        machine = machine_of_queue(queue or "")
        return self.of_machine(machine if queue == agent_queue(machine) else None)

    def of_machine(self, machine: str | None) -> "EncryptingCodec":
        """Returns the codec for payloads to or from a machine's agent; `machine` None: for all other payloads."""
        return EncryptingCodec(self._keys, machine)

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Encrypts payloads."""
        return [self.encrypt(payload) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Decrypts payloads.

        Raises:
            UnknownKey, CannotDecrypt: see `decrypt`.
        """
        return [self.decrypt(payload) for payload in payloads]

    def encrypt(self, payload: Payload) -> Payload:
        """Returns the encrypted payload, with its metadata."""
        key, cipher = self._keys.newest(self._machine)
        nonce = os.urandom(_NONCE_BYTES)
        metadata = {"encoding": ENCODING, _KEY_ID: key.id.encode()}
        if key.machine is not None:
            metadata[_MACHINE] = key.machine.encode()
        return Payload(metadata=metadata, data=nonce + cipher.encrypt(nonce, payload.SerializeToString(), None))

    def decrypt(self, payload: Payload) -> Payload:
        """Returns the decrypted payload.

        Raises:
            UnknownKey: the key is not in the file.
            CannotDecrypt: the payload was damaged or changed.
        """
        if payload.metadata.get("encoding") != ENCODING:
            return payload
        try:
            machine = payload.metadata[_MACHINE].decode() if _MACHINE in payload.metadata else None
            cipher = self._keys.cipher(payload.metadata[_KEY_ID].decode(), machine)
            nonce, sealed = payload.data[:_NONCE_BYTES], payload.data[_NONCE_BYTES:]
            return Payload.FromString(cipher.decrypt(nonce, sealed, None))
        except (InvalidTag, DecodeError, ValueError):
            raise CannotDecrypt("a payload in Temporal was damaged or changed: it cannot be decrypted") from None

    def encrypt_in(self, message: Message, to_payload: Callable[[Any], Payload]) -> None:
        """Encrypts all payloads and the texts of all failures in a request, in place. `to_payload` makes payloads."""
        for found in parts_of(message):
            if isinstance(found, Payload):
                found.CopyFrom(self.encrypt(found))
            elif isinstance(found, Failure):
                texts = {"message": found.message, "stack_trace": found.stack_trace}
                found.encoded_attributes.CopyFrom(self.encrypt(to_payload(texts)))
                found.message, found.stack_trace = _HIDDEN, ""

    def decrypt_in(self, message: Message) -> None:
        """Decrypts all payloads in a response, in place. Raises `UnknownKey` and `CannotDecrypt` like `decrypt`."""
        for found in parts_of(message):
            if isinstance(found, Payload):
                found.CopyFrom(self.decrypt(found))


def parts_of(message: Message) -> Iterator[Message]:
    """Yields the payloads and failures in a message; the parts of a failure before the failure."""
    if not isinstance(message, Payload):
        for field, value in message.ListFields():
            if field.message_type is None:
                continue
            if field.message_type.GetOptions().map_entry:
                if field.message_type.fields_by_name["value"].message_type is not None:
                    for one in value.values():
                        yield from parts_of(one)
            elif isinstance(value, Message):
                yield from parts_of(value)
            else:
                for one in value:
                    yield from parts_of(one)
    if isinstance(message, Payload | Failure):
        yield message
