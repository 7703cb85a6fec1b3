"""Binds Temporal's task tokens to the machine that polled them, and to the type of the activity.

A task token of Temporal contains only ids, which can be guessed or read elsewhere. With another machine's token an
agent could complete that machine's tasks. So the gateway adds the type of the activity and a message authentication
code over machine, type and token to each token that it hands out, and accepts no other token. The type determines which
results the gateway forwards.
"""

import hashlib
import hmac
from pathlib import Path

from infra.keys import load_master_key
from proxies.gateway.refusals import denied

_VERSION = b"\x02"
_TAG_BYTES = hashlib.sha256().digest_size


class TaskTokens:
    """Seals and opens task tokens. Stateless: tokens stay valid when the gateway restarts, and for all gateways."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of_installation(cls, master_key: Path) -> "TaskTokens":
        """Returns the tokens of an installation. Their key is derived from its master key.

        Raises:
            ConfigurationError: the master key cannot be read.
        """
        return cls(hmac.digest(load_master_key(master_key), b"gateway task tokens", "sha256"))

    def seal(self, machine: str, activity: str, token: bytes) -> bytes:
        """Returns the token for the agent of `machine`, of a task of the type `activity`."""
        # Neither a type nor the id of a machine contains a zero byte, so no other triple has the same encoding.
        task = activity.encode() + b"\0" + token
        return _VERSION + self._tag(machine, task) + task

    def open(self, machine: str, sealed: bytes) -> tuple[str, bytes]:
        """Returns the type of the activity and the token of Temporal in a sealed token.

        Raises:
            Refused: the token was not sealed for `machine`.
        """
        version, tag, task = sealed[:1], sealed[1 : 1 + _TAG_BYTES], sealed[1 + _TAG_BYTES :]
        if version != _VERSION or not hmac.compare_digest(tag, self._tag(machine, task)):
            raise denied(f"task_token: must be a token that machine {machine} polled from this gateway")
        activity, _, token = task.partition(b"\0")
        return activity.decode(), token

    def _tag(self, machine: str, task: bytes) -> bytes:
        return hmac.digest(self._key, machine.encode() + b"\0" + task, "sha256")
