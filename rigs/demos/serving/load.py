"""A constant load on a service, in a process of its own: `python -m rigs.demos.serving.load URL RATE SECONDS FILE`.

Requests begin at fixed times, whether or not earlier ones have ended. None is repeated. One line of JSON for each
request is written to the file when it has ended.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import TextIO

import httpx

_LONGEST_S = 60.0
_STREAM_EACH = 10
"""One in this many requests is a stream of two seconds; the others are answered at once."""


@dataclass
class Request:
    """One request and its outcome. Times are seconds since the epoch."""

    number: int
    began_s: float
    ended_s: float = 0.0
    first_byte_s: float | None = None
    """Seconds from the start to the first byte of the answer, if its status is 200."""
    outcome: str = "failed"
    """`ok`; `failed`: no answer, or a status other than 200; `cut`: the answer broke off after its first byte."""
    error: str = ""


async def _one(client: httpx.AsyncClient, url: str, request: Request) -> None:
    is_stream = request.number % _STREAM_EACH == 0
    wanted = {"tokens": 40, "pause_ms": 50} if is_stream else {"tokens": 20}
    tail = b""
    try:
        async with client.stream("GET", f"{url}/generate", params={**wanted, "seed": request.number}) as answer:
            if answer.status_code != 200:
                request.error = f"status {answer.status_code}"
                return
            request.first_byte_s = time.time() - request.began_s
            async for chunk in answer.aiter_raw():
                tail = (tail + chunk)[-64:]
        if b"[DONE]" in tail:
            request.outcome = "ok"
        else:
            request.error, request.outcome = "the answer has no end", "cut"
    except httpx.HTTPError as error:
        request.error = f"{type(error).__name__}: {error}"
        request.outcome = "failed" if request.first_byte_s is None else "cut"


async def _run(url: str, per_s: float, seconds: float, out: TextIO) -> None:
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
    async with httpx.AsyncClient(timeout=_LONGEST_S, limits=limits, trust_env=False) as client:

        async def one(number: int) -> None:
            request = Request(number, time.time())
            await _one(client, url, request)
            request.ended_s = time.time()
            out.write(json.dumps(asdict(request)) + "\n")

        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(round(per_s * seconds)):
                await asyncio.sleep(max(0.0, began_s + number / per_s - time.monotonic()))
                group.create_task(one(number))


def main() -> None:
    """Sends the requests."""
    url, per_s, seconds, file = sys.argv[1:]
    with open(file, "w", buffering=1) as out:
        asyncio.run(_run(url, float(per_s), float(seconds), out))


if __name__ == "__main__":
    main()
