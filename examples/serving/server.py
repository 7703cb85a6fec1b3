"""A small HTTP model server: a Markov model of letters, trained at the start, that streams what it generates.

    GET /health                      200 once the model is trained
    GET /generate?tokens=20&pause_ms=10&seed=1    server-sent events, one for each letter
    POST /generate                   the same, with a JSON body

Each event has an id. A request with the header `Last-Event-ID` gets the events after this one: so any replica continues
a stream that another one has begun. What it generates follows from the request alone, so it needs no state for that.

It needs only Python. It listens on `MIZZEN_PORT`, or on 8000 without it.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

TEXT = (
    "the mizzen is the mast behind the mainmast of a ship and its sail helps to hold the bow to the wind while the"
    " crew sets the other sails or takes them in before the storm "
)
ORDER = 3
MOST_TOKENS = 10_000


def train(text: str) -> dict[str, Counter[str]]:
    """Returns how often each letter follows each sequence of `ORDER` letters."""
    model: dict[str, Counter[str]] = defaultdict(Counter)
    around = text + text[: ORDER + 1]
    for at in range(len(text)):
        model[around[at : at + ORDER]][around[at + ORDER]] += 1
    return dict(model)


def generate(model: dict[str, Counter[str]], tokens: int, seed: int) -> Any:
    """Yields letters. Equal seeds yield equal letters, on every replica."""
    chance = random.Random(seed)
    state = chance.choice(sorted(model))
    for _ in range(tokens):
        following = model[state]
        letter = chance.choices(list(following), list(following.values()))[0]
        state = state[1:] + letter
        yield letter


class Handler(BaseHTTPRequestHandler):
    """Answers requests, each in a thread of its own."""

    protocol_version = "HTTP/1.1"
    model: dict[str, Counter[str]] | None = None
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answers /health and /generate."""
        path = urlsplit(self.path)
        if path.path == "/health":
            self._answer(200 if self.model is not None else 503)
        elif path.path == "/generate":
            self._generate(dict(parse_qsl(path.query)))
        else:
            self._answer(404)

    def do_POST(self) -> None:
        """Answers /generate."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            self._generate(json.loads(body or b"{}"))
        except ValueError:
            self._answer(400)

    def _generate(self, asked: dict[str, Any]) -> None:
        try:
            tokens = min(int(asked.get("tokens", 20)), MOST_TOKENS)
            pause_s = float(asked.get("pause_ms", 0)) / 1000
            seed = int(asked.get("seed", 0))
            first = int(self.headers.get("last-event-id", -1)) + 1
        except (TypeError, ValueError):
            self._answer(400)
            return
        if self.model is None:
            self._answer(503)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("x-replica", str(os.getpid()))
        self.end_headers()
        for number, letter in enumerate(generate(self.model, tokens, seed)):
            if number < first:
                continue  # The client has it. Another model would compute the state from the letters before.
            self._chunk(f"id: {number}\ndata: {letter}\n\n".encode())
            if pause_s:
                time.sleep(pause_s)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: one line for each request would be most of the work."""


class Server(ThreadingHTTPServer):
    """The server, with a queue of connections that is long enough for bursts."""

    daemon_threads = True
    request_queue_size = 512


def main() -> None:
    """Serves until SIGTERM."""
    port = int(os.environ.get("MIZZEN_PORT", "8000"))
    server = Server(("", port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    time.sleep(float(os.environ.get("LOADING_S", "0")))
    Handler.model = train(TEXT)
    print(f"listening on port {port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
