"""The header `Idempotency-Key`, with which a client may repeat a request whose response was lost."""

from typing import Annotated

from fastapi import Header

from api.problems import HttpProblem, ProblemType, shown

MAX_KEY = 200
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", description="A repeated request with the same key and body changes nothing more"
    ),
]  # fmt: skip


def check_key(given: str | None) -> str | None:
    """Validates an Idempotency-Key and returns it.

    Raises:
        Problem: 400, the key is invalid.
    """
    if given is not None and not (1 <= len(given) <= MAX_KEY and given.isascii() and given.isprintable()):
        raise HttpProblem(
            ProblemType.MALFORMED_REQUEST, f"Idempotency-Key must have 1 to {MAX_KEY} printable ASCII characters"
        )
    return given


def mismatch(key: str, made: str) -> HttpProblem:
    """Returns a 422 problem: the key was used with another request, which created `made`."""
    return HttpProblem(
        ProblemType.IDEMPOTENCY_MISMATCH,
        f"Idempotency-Key {shown(key)} was used with another body for {made}; use a new key",
    )
