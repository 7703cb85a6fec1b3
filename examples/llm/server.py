"""A server with the API of OpenAI for a small language model, which it trains at its start. It needs only Python.

    GET  /health               200 once the model is trained; its header Mizzen-Load has the tokens of a second
    GET  /v1/models
    POST /v1/chat/completions  messages, max_tokens, temperature, seed, stream, stream_options.include_usage

The model counts which token follows the last three tokens in the reference of Python's language, which every Python has
(`pydoc_data.topics`). So it is a real model of a language, and far from a large one: it writes the manner of the
reference, without its sense. Each request gets at most `TOKENS_PER_S` tokens a second, as from a large model; 0: no
limit.

It listens on `MIZZEN_PORT`, or on 8000 without it.
"""

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pydoc_data.topics import topics
from typing import Any

NAME = "python-reference-3gram"
ORDER = 3
MOST_TOKENS = 4096
WINDOW_S = 10.0
"""The time over which the tokens of a second are counted."""
_TOKEN = re.compile(r"\s?\w+|\s?[^\w\s]|\s+")


def tokens_of(text: str) -> list[str]:
    """Returns the tokens of a text: words and signs, each with the space before it. Joined, they are the text."""
    return _TOKEN.findall(text)


class Model:
    """Chances of the next token, after up to `ORDER` tokens."""

    def __init__(self, text: str) -> None:
        self._following: dict[tuple[str, ...], Counter[str]] = {}
        tokens = tokens_of(text)
        for at, token in enumerate(tokens):
            for order in range(min(at, ORDER) + 1):
                self._following.setdefault(tuple(tokens[at - order : at]), Counter())[token] += 1

    def generate(self, prompt: Sequence[str], temperature: float, seed: int | None) -> Iterator[str]:
        """Yields tokens without an end. A seed makes them the same on every replica; temperature 0: the likeliest."""
        chance, state = random.Random(seed), list(prompt[-ORDER:])
        while True:
            following = self._after(state)
            if temperature == 0:
                token = max(following, key=lambda one: (following[one], one))
            else:
                weights = [count ** (1 / temperature) for count in following.values()]
                token = chance.choices(list(following), weights)[0]
            state = [*state, token][-ORDER:]
            yield token

    def _after(self, state: Sequence[str]) -> Counter[str]:
        """Returns what followed the longest known end of `state`."""
        ends = (tuple(state[at:]) for at in range(len(state) + 1))
        return next(self._following[end] for end in ends if end in self._following)


class Meter:
    """Counts the tokens of the last `WINDOW_S` seconds, of all requests."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._lock = threading.Lock()

    def count(self) -> None:
        """Counts one token."""
        with self._lock:
            self._times.append(time.monotonic())

    def per_s(self) -> float:
        """Returns the tokens of a second."""
        with self._lock:
            while self._times and self._times[0] < time.monotonic() - WINDOW_S:
                self._times.popleft()
            return len(self._times) / WINDOW_S


class BadRequest(ValueError):
    """A field of a request is not valid; the message says which, and what would be."""


def number(body: dict[str, Any], field: str, default: Any, low: float, high: float, kind: type) -> Any:
    """Returns a number of a request.

    Raises:
        BadRequest: it is no number from `low` to `high`.
    """
    value = body.get(field, default)
    valid = isinstance(value, int | kind) and not isinstance(value, bool) and low <= value <= high
    if value is not default and not valid:
        raise BadRequest(f"{field}: {value!r}: must be a number from {low:g} to {high:g}")
    return value


def prompt_of(body: dict[str, Any]) -> str:
    """Returns the text of the messages of a request.

    Raises:
        BadRequest: there are none, or one has no text.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: must be a list with at least one message")
    texts = [one.get("content") if isinstance(one, dict) else None for one in messages]
    if not all(isinstance(one, str) for one in texts):
        raise BadRequest("messages: each must have a string as content")
    return "\n".join(map(str, texts))


class Handler(BaseHTTPRequestHandler):
    """Answers requests, each in a thread of its own."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    model: Model | None = None
    meter = Meter()
    tokens_per_s = 0.0

    def do_GET(self) -> None:
        """Answers /health and /v1/models."""
        if self.path == "/health":
            self._answer(200 if self.model else 503, {"ready": self.model is not None})
        elif self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "example"}]})
        else:
            self._fail(404, f"{self.path}: no such path")

    def do_POST(self) -> None:
        """Answers /v1/chat/completions."""
        text = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path != "/v1/chat/completions":
            self._fail(404, f"{self.path}: no such path")
        elif self.model is None:
            self._fail(503, "the model is being trained")
        else:
            try:
                body = json.loads(text)
                if not isinstance(body, dict):
                    raise BadRequest("the body must be an object")
                self._complete(self.model, body)
            except BadRequest as error:
                self._fail(400, str(error))
            except ValueError:
                self._fail(400, "the body must be JSON")

    def _complete(self, model: Model, body: dict[str, Any]) -> None:
        prompt = tokens_of(prompt_of(body))
        most = number(body, "max_tokens", 64, 1, MOST_TOKENS, int)
        temperature = number(body, "temperature", 1.0, 0, 2, float)
        seed = number(body, "seed", None, -(2**63), 2**63, int)
        tokens = self._paced(model.generate(prompt, temperature, seed), most)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": most, "total_tokens": len(prompt) + most}
        head = {"id": f"chatcmpl-{random.getrandbits(64):016x}", "created": int(time.time()), "model": NAME}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(tokens)}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            self._answer(200, {**head, "object": "chat.completion", "choices": [choice], "usage": usage})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        head["object"] = "chat.completion.chunk"
        for token in tokens:
            self._event({**head, "choices": [{"index": 0, "delta": {"content": token}, "finish_reason": None}]})
        self._event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({**head, "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _paced(self, tokens: Iterator[str], most: int) -> Iterator[str]:
        """Yields `most` tokens, at most `tokens_per_s` of them in a second, and counts them."""
        start_s = time.monotonic()
        for at in range(most):
            if self.tokens_per_s:
                time.sleep(max(0.0, start_s + (at + 1) / self.tokens_per_s - time.monotonic()))
            self.meter.count()
            yield next(tokens)

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(value)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _fail(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("mizzen-load", f"{self.meter.per_s():.2f}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: one line for each request would be most of the work."""


class Server(ThreadingHTTPServer):
    """The server, with a queue of connections that is long enough for bursts."""

    daemon_threads = True
    request_queue_size = 512


def main() -> None:
    """Serves until SIGTERM."""
    port = int(os.environ.get("MIZZEN_PORT", "8000"))
    Handler.tokens_per_s = float(os.environ.get("TOKENS_PER_S", "40"))
    server = Server(("", port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Handler.model = Model("\n".join(topics.values()))
    print(f"listening on port {port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
