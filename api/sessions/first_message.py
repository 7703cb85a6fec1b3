"""The first message of a session's client: the kind of session that it requests, with its parameters."""

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from api.bodies import Body, Line
from infra.db.task_sessions import SessionKind
from mizzen_client.tunnel.frames import BadFrame, control, unpack


class BeginSession(Body):
    """The client's first message: command and terminal; empty for a session that forwards ports."""

    type: Literal["begin"] = "begin"
    command: list[Annotated[str, Field(max_length=32 << 10)]] = []
    terminal: bool = False
    rows: int = Field(24, ge=1, le=10_000)
    columns: int = Field(80, ge=1, le=10_000)
    term: Line = "xterm"
    """The kind of the client's terminal (`TERM`)."""

    def for_agent(self, kind: str) -> bytes:
        """Returns the message for the agent."""
        return control("begin", kind=kind, **self.model_dump(exclude={"type"}))


def read_begin(message: bytes | str, kind: str) -> BeginSession:
    """Returns the client's first message.

    Raises:
        BadFrame: the frame is no first message, or it does not match the kind of the session.
    """
    try:
        begin = BeginSession.model_validate(unpack(message).message())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "begin"
        raise BadFrame(f"{place}: {first['msg']}") from None
    if kind == SessionKind.EXEC and not (begin.command and begin.command[0]):
        raise BadFrame("command: is empty; must be a program and its arguments")
    if any("\0" in word for word in begin.command):
        raise BadFrame("command: contains a NUL character")
    return begin
