"""Reads which requests arrive in a replay, and how replicas serve them, from the options of `mizzen spot replay`."""

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from infra.errors import ConfigurationError
from research.spot.latency import ServingSettings
from research.spot.request_files import (
    RATE_COLUMNS,
    RateForm,
    RequestError,
    TokenForm,
    columns_of,
    read_rates,
    read_tokens,
)
from research.spot.request_options import RequestOptions
from research.spot.requests import PoissonRequests, RequestSource

_MOST_REQUESTS = 20_000_000


@dataclass(frozen=True)
class RequestLoad:
    """The requests of a replay."""

    source: RequestSource
    serving: ServingSettings
    described: dict[str, Any]
    """The options with their defaults, as values of JSON."""


@dataclass(frozen=True)
class _Form:
    """A form of requests: the options that have an effect on it, with their defaults."""

    name: str
    said: str
    options: dict[str, float]
    concurrency: int = ServingSettings.concurrency


_POISSON = _Form("poisson", "poisson:RATE_PER_S", {"service_s": RateForm.service_s})
_RATES = _Form(
    "requests per minute", "a trace of requests per minute",
    {"request_scale": RateForm.scale, "request_cap": RateForm.most_per_minute, "service_s": RateForm.service_s},
)  # fmt: skip
_TOKENS = _Form(
    "tokens", "a trace of requests and tokens",
    {
        "request_scale": TokenForm.share,
        "prefill_tokens_per_s": TokenForm.prefill_per_s,
        "decode_tokens_per_s": TokenForm.decode_per_s,
    },
    concurrency=16,  # Servers of language models answer many requests in a batch.
)  # fmt: skip


def workload_of(options: RequestOptions, window_s: float) -> RequestLoad | None:
    """Reads the requests; returns None without `--requests`.

    Args:
        options: the options.
        window_s: the length of a window in seconds.

    Raises:
        ConfigurationError: an option or the file is not valid, an option has no effect on requests of this form, or a
            window has too many requests.
    """
    if options.requests is None:
        _refuse(options, (), "without --requests", "give --requests as well")
        return None
    form = _form(options.requests)
    known = {**form.options, "concurrency": form.concurrency, "timeout_s": ServingSettings.timeout_s}
    flags = ", ".join(sorted(map(_flag, known)))
    _refuse(options, {"requests", *known}, f"with {form.said}", f"give {flags} only")
    chosen = {name: value for name, value in vars(options).items() if value is not None and name in known}
    given: dict[str, Any] = {**known, **chosen}
    source, described = _source(options.requests, form, [given[name] for name in form.options])
    expected = source.expected(window_s)
    if expected > _MOST_REQUESTS:
        raise ConfigurationError(
            f"--requests: {options.requests}: about {expected:.2g} requests in each window: at most "
            f"{_MOST_REQUESTS:,} fit into memory: lower the rate, --request-scale or --window-h"
        )
    serving = ServingSettings(given["concurrency"], given["timeout_s"])
    return RequestLoad(source, serving, {"form": form.name, **described, **given})


def _form(requests: str) -> _Form:
    if requests.partition(":")[0] == _POISSON.name:
        return _POISSON
    try:
        return _RATES if columns_of(Path(requests)) == RATE_COLUMNS else _TOKENS
    except RequestError as error:
        raise ConfigurationError(f"--requests: {error}, or {_POISSON.said}") from None


def _source(requests: str, form: _Form, values: list[float]) -> tuple[RequestSource, dict[str, Any]]:
    """Returns the requests of a form with the values of its options, and the fields that also describe them."""
    if form is _POISSON:
        rate_per_s = _rate_per_s(requests)
        return PoissonRequests(rate_per_s, *values), {"rate_per_s": rate_per_s}
    if form is _TOKENS and values[0] > 1:
        raise ConfigurationError(
            f"--request-scale: {values[0]:g}: a trace of single requests can only be thinned: give at most 1"
        )
    path = Path(requests)
    try:
        found = read_rates(path, RateForm(*values)) if form is _RATES else read_tokens(path, TokenForm(*values))
    except RequestError as error:
        raise ConfigurationError(f"--requests: {error}") from None
    return found, {"file": str(path)}


def _rate_per_s(requests: str) -> float:
    try:
        rate_per_s = float(requests.partition(":")[2])
    except ValueError:
        rate_per_s = -1.0
    if not (rate_per_s > 0 and isfinite(rate_per_s)):
        right = "the rate must be a number of requests per second above 0, as in poisson:0.15"
        raise ConfigurationError(f"--requests: {requests}: {right}")
    return rate_per_s


def _refuse(options: RequestOptions, known: Collection[str], when: str, right: str) -> None:
    """Refuses options that have no effect: all but the known ones."""
    for name, value in vars(options).items():
        if value is not None and name not in known:
            raise ConfigurationError(f"{_flag(name)}: {value:g}: has no effect {when}: {right}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
