"""The protocol of memory servers: frames of JSON, contents after them, and a mutual proof of the run's token.

The token itself is never sent. Contents are not encrypted; the checksums in the log tell whether they are intact.
"""

import hmac
import json
import os
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
_MOST_BYTES = 64 << 20
_BEFORE_PROOF_BYTES = 4096


class ProtocolError(OSError):
    """The other side does not have the token of this run, or does not follow the protocol."""


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a frame."""
    body = json.dumps(message).encode()
    link.sendall(_LENGTH.pack(len(body)) + body)


def receive(link: socket.socket, most_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """Receive a frame.

    Raises:
        ProtocolError: the frame is too long or malformed, or the connection was closed.
    """
    length = _LENGTH.unpack(_exactly(link, _LENGTH.size))[0]
    if length > most_bytes:
        raise ProtocolError(f"a frame of {length} bytes; at most {most_bytes} are allowed")
    try:
        message = json.loads(_exactly(link, length))
    except ValueError as error:
        raise ProtocolError(f"a malformed frame: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("a malformed frame: not an object")
    return message


def fill(link: socket.socket, into: memoryview) -> None:
    """Receive exactly `into`.

    Raises:
        ProtocolError: the connection was closed before.
    """
    done = 0
    while done < len(into):
        count = link.recv_into(into[done:])
        if not count:
            raise ProtocolError("the connection was closed")
        done += count


def _exactly(link: socket.socket, size_bytes: int) -> bytearray:
    body = bytearray(size_bytes)
    fill(link, memoryview(body))
    return body


def greet(link: socket.socket, token: bytes) -> None:
    """As a server: let the client prove that it has the token, then prove it to the client.

    Raises:
        ProtocolError: the client does not have the token.
    """
    mine = os.urandom(16).hex()
    send(link, {"nonce": mine})
    told = receive(link, _BEFORE_PROOF_BYTES)
    theirs = str(told.get("nonce"))
    if not hmac.compare_digest(str(told.get("proof")).encode(), _proof(token, "client", mine, theirs).encode()):
        raise ProtocolError("the client does not have the token of this run")
    send(link, {"proof": _proof(token, "server", mine, theirs)})


def introduce(link: socket.socket, token: bytes) -> None:
    """As a client: prove that this process has the token, and let the server prove it.

    Raises:
        ProtocolError: the server does not have the token.
    """
    theirs, mine = str(receive(link, _BEFORE_PROOF_BYTES).get("nonce")), os.urandom(16).hex()
    send(link, {"nonce": mine, "proof": _proof(token, "client", theirs, mine)})
    told = str(receive(link, _BEFORE_PROOF_BYTES).get("proof"))
    if not hmac.compare_digest(told.encode(), _proof(token, "server", theirs, mine).encode()):
        raise ProtocolError("the server does not have the token of this run")


def _proof(token: bytes, side: str, of_server: str, of_client: str) -> str:
    return hmac.new(token, f"{side} {of_server} {of_client}".encode(), "sha256").hexdigest()
