"""Follows events across lost connections: each is yielded exactly once, in order."""

from collections.abc import Callable, Iterator
from typing import cast

from mizzen_client.errors import Unreachable
from mizzen_client.transport import Backoff, Params, StreamBroken, Transport, decode
from mizzen_client.views import Event


def events(
    transport: Transport,
    path: str,
    pauses: Backoff,
    after: str | None,
    follow: bool,
    ended: Callable[[], bool] | None,
) -> Iterator[Event]:
    """Yield the server-sent events after the one with the id `after`.

    After a lost connection, the stream is resumed after the last event received. If the server ends the stream, the
    iteration ends if `ended` returns true; else (the server restarted) the stream is resumed.
    """
    over = not follow
    while True:
        params: Params = {"follow": "false" if over else "true", "after": after}
        problem = "the stream of events ended"
        try:
            with transport.stream(path, params, {"accept": "text/event-stream"}) as lines:
                pauses.connected()
                for event in _parse(lines):
                    after = event["id"]
                    pauses.succeeded()
                    yield event
            if over:
                return
            # Read once more without following: events may lie between the last one received and the end.
            over = ended is not None and ended()
            if over:
                continue
        except StreamBroken as error:
            problem = str(error)
        pauses.pause(Unreachable(problem))


def _parse(lines: Iterator[bytes]) -> Iterator[Event]:
    """Parse an SSE stream into events. Comments and unknown fields are ignored."""
    id_, data = "", ""
    for raw in lines:
        name, _, value = raw.decode("utf-8", "replace").rstrip("\r").partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            id_ = value
        elif name == "data":
            data += value
        elif not (name or value) and data:
            yield cast(Event, {**decode(data), "id": id_})
            data = ""
