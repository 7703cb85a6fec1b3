"""Reads traces of requests: CSV files with the number of requests per minute, or with the tokens of each request."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path

import numpy as np

from research.spot.requests import RateRequests, RequestSource, TokenRequests

RATE_COLUMNS = ("Time (min)", "Requests")
"""The columns of a trace of rates, as in `maf1_cleaned.csv` of SkyServe's artifact."""
TOKEN_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The columns of a trace of tokens, as in Azure's public traces of LLM inference."""

_LAST_MINUTE = 10_000_000
"""About 19 years; a larger number is not a number of minutes since the start of a trace."""


class RequestError(ValueError):
    """A trace of requests cannot be used; the message names the file, the field and what would be right."""


@dataclass(frozen=True)
class RateForm:
    """How a trace of rates is read. The defaults are those of SkyServe's artifact, except the service time."""

    scale: float = 1e-4
    """The factor of the numbers of requests."""
    most_per_minute: float = 90.0
    """The largest number of requests in a minute, after scaling."""
    service_s: float = 10.0
    """The mean service time in seconds."""


@dataclass(frozen=True)
class TokenForm:
    """How a trace of tokens is read. The rates are assumptions, for a large model on a machine with several GPUs."""

    share: float = 1.0
    """The probability with which a request is kept."""
    prefill_per_s: float = 4000.0
    """Tokens of the prompt that are processed in a second."""
    decode_per_s: float = 30.0
    """Tokens that are generated in a second for each request."""


def columns_of(path: Path) -> tuple[str, ...]:
    """Returns the columns of a trace of requests: `RATE_COLUMNS` or `TOKEN_COLUMNS`. Other columns are ignored.

    Raises:
        RequestError: the file cannot be read, or has neither form.
    """
    header = _Rows(path).header
    for columns in (RATE_COLUMNS, TOKEN_COLUMNS):
        if set(columns) <= set(header):
            return columns
    found = ", ".join(header[:6]) or "none"
    forms = " or ".join(",".join(columns) for columns in (RATE_COLUMNS, TOKEN_COLUMNS))
    raise RequestError(f"{path}: columns: {found}: the first line must have the columns {forms}")


def read_rates(path: Path, form: RateForm) -> RequestSource:
    """Reads a trace of rates. Minutes that are missing between the first and the last have no requests.

    Raises:
        RequestError: the file is not valid.
    """
    counts: dict[int, float] = {}
    last = -1
    for where, (minute, requests) in _Rows(path).of(RATE_COLUMNS):
        at = _number(where, RATE_COLUMNS[0], minute)
        if not at.is_integer() or not last < at <= _LAST_MINUTE:
            raise RequestError(
                f"{where}: {RATE_COLUMNS[0]}: {minute}: give whole minutes in increasing order, up to {_LAST_MINUTE}"
            )
        last = int(at)
        counts[last] = min(form.most_per_minute, form.scale * _number(where, RATE_COLUMNS[1], requests))
    if not counts:
        raise RequestError(f"{path}: has no rows: give at least one minute")
    return RateRequests(tuple(counts.get(k, 0.0) for k in range(min(counts), last + 1)), form.service_s)


def read_tokens(path: Path, form: TokenForm) -> RequestSource:
    """Reads a trace of tokens. A request takes the time of its prefill and of its decoding.

    The trace ends one mean distance of two requests after its last request.

    Raises:
        RequestError: the file is not valid.
    """
    arrival_s: list[float] = []
    service_s: list[float] = []
    first: datetime | None = None
    for where, (stamp, context, generated) in _Rows(path).of(TOKEN_COLUMNS):
        try:
            at = datetime.fromisoformat(stamp)
            first = first or at
            arrival_s.append((at - first).total_seconds())
        except (ValueError, TypeError):  # A TypeError: one time has a zone, the other has none.
            raise RequestError(
                f"{where}: {TOKEN_COLUMNS[0]}: {stamp}: give times such as 2023-11-16 18:15:46.68, all with "
                "or all without a zone"
            ) from None
        if len(arrival_s) > 1 and arrival_s[-1] < arrival_s[-2]:
            raise RequestError(f"{where}: {TOKEN_COLUMNS[0]}: {stamp}: is before the row above: sort the rows")
        tokens = [
            _number(where, name, text) for name, text in zip(TOKEN_COLUMNS[1:], (context, generated), strict=True)
        ]
        service_s.append(tokens[0] / form.prefill_per_s + tokens[1] / form.decode_per_s)
    if not arrival_s or arrival_s[-1] == 0:
        raise RequestError(f"{path}: {TOKEN_COLUMNS[0]}: give requests at two different times at least")
    length_s = arrival_s[-1] * len(arrival_s) / (len(arrival_s) - 1)
    return TokenRequests(np.asarray(arrival_s), np.asarray(service_s), length_s, form.share)


class _Rows:
    """The rows of a CSV file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines(keepends=True)
        except OSError as error:
            raise RequestError(f"{path}: {error.strerror}: give a readable CSV file") from None
        except UnicodeDecodeError:
            raise RequestError(f"{path}: is not text in UTF-8: give a readable CSV file") from None
        self._reader = csv.reader(lines)
        self.header = [name.strip() for name in next(self._reader, [])]

    def of(self, columns: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
        """Yields the place of each row, for messages, and its texts in these columns. Empty lines are skipped."""
        at = [self.header.index(name) for name in columns]
        for row in self._reader:
            where = f"{self._path}: line {self._reader.line_num}"
            if row and len(row) <= max(at):
                raise RequestError(f"{where}: has {len(row)} fields: needs {', '.join(columns)}")
            if row:
                yield where, [row[k] for k in at]


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value >= 0 and isfinite(value)):
        raise RequestError(f"{where}: {name}: {text}: give a number, 0 or more")
    return value
