"""The options of `mizzen spot replay` on requests. Their defaults depend on the form of the requests."""

from dataclasses import dataclass
from typing import Any

import click

from server.options import finite, option

_NUMBER: dict[str, Any] = {"type": float, "callback": finite(above_zero=True)}


@dataclass(frozen=True)
class RequestOptions:
    """The options as given; None: not given."""

    requests: str | None = option(
        metavar="poisson:RATE_PER_S|FILE",
        help="Also measure the latency of requests: a rate, or a CSV file with requests per minute or tokens.",
    )
    request_scale: float | None = option(
        **_NUMBER,
        help="Factor of the number of requests in a file (default: 1e-4 for requests per minute, otherwise 1).",
    )
    request_cap: float | None = option(**_NUMBER, help="Most requests in a minute, after scaling (default: 90).")
    service_s: float | None = option(**_NUMBER, help="Mean time to answer a request without tokens (default: 10).")
    prefill_tokens_per_s: float | None = option(**_NUMBER, help="For files with tokens (default: 4000).")
    decode_tokens_per_s: float | None = option(**_NUMBER, help="For files with tokens, per request (default: 30).")
    concurrency: int | None = option(
        type=click.IntRange(min=1),
        help="Requests that a replica answers at a time (default: 4; 16 for files with tokens).",
    )
    timeout_s: float | None = option(**_NUMBER, help="Time after which a request fails (default: 100).")
