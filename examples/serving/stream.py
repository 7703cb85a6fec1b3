"""Prints a stream of the example's server to its end, whatever happens to the replicas: `stream.py URL`.

If the stream breaks off, the request is sent again with the id of the last event in `Last-Event-ID`. The replica that
gets it continues after this event.
"""

import sys
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from urllib.error import HTTPError
from urllib.request import Request, urlopen

TRIES, PAUSE_S = 20, 0.5


def events(url: str) -> Iterator[str]:
    """Yields the data of all events, each once.

    Raises:
        OSError: the stream could not be continued: `TRIES` requests in a row brought no event.
    """
    last, failures = None, 0
    while failures < TRIES:
        request = Request(url, headers={} if last is None else {"Last-Event-ID": last})
        try:
            with urlopen(request, timeout=30) as answer:
                for id_, data in _events(answer):
                    if data == "[DONE]":
                        return
                    last, failures = id_, 0
                    yield data
        except HTTPError as error:
            if error.code < 500:
                raise
        except (OSError, HTTPException):
            pass  # The replica, or the balancer, has gone.
        failures += 1
        time.sleep(PAUSE_S)
    raise OSError(f"{url}: no event in {TRIES} requests")


def _events(answer: HTTPResponse) -> Iterator[tuple[str, str]]:
    """Yields id and data of each complete event."""
    fields: dict[str, str] = {}
    for line in answer:
        name, colon, value = line.decode().rstrip("\n").partition(": ")
        if colon:
            fields[name] = value
        elif fields:  # An empty line ends an event.
            yield fields.get("id", ""), fields.get("data", "")
            fields = {}


if __name__ == "__main__":
    for letter in events(sys.argv[1]):
        print(letter, end="", flush=True)
    print()
