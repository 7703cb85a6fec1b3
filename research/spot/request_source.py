"""The options of `mizzen spot replay` on requests: which requests arrive, and how replicas serve them."""

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
from research.spot.requests import PoissonRequests, RequestSource

_POISSON = "poisson"
_MOST_REQUESTS = 20_000_000
_TOKEN_CONCURRENCY = 16
"""The default of `--concurrency` for a trace of tokens: servers of language models answer many requests in a batch."""


@dataclass(frozen=True)
class RequestOptions:
    """The options as given; None: not given. The field names are those of the options."""

    requests: str | None = None
    request_scale: float | None = None
    request_cap: float | None = None
    service_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    concurrency: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class Workload:
    """The requests of a replay."""

    source: RequestSource
    serving: ServingSettings
    described: dict[str, Any]
    """The options with their defaults, as values of JSON."""


def workload_of(options: RequestOptions, window_s: float) -> Workload | None:
    """Reads the requests; returns None without `--requests`.

    Args:
        options: the options.
        window_s: the length of a window in seconds.

    Raises:
        ConfigurationError: an option or the file is not valid, an option has no effect on requests of this form, or a
            window has too many requests.
    """
    if options.requests is None:
        _refuse(options, set(), "without --requests")
        return None
    workload = _read(options, options.requests)
    expected = workload.source.expected(window_s)
    if expected > _MOST_REQUESTS:
        raise ConfigurationError(
            f"--requests: {options.requests}: about {expected:.2g} requests in each window: at most "
            f"{_MOST_REQUESTS:,} fit into memory: lower the rate, --request-scale or --window-h"
        )
    return workload


def _read(options: RequestOptions, requests: str) -> Workload:
    kind, _, rate = requests.partition(":")
    if kind == _POISSON:
        return _poisson(options, rate)
    path = Path(requests)
    try:
        columns = columns_of(path)
    except RequestError as error:
        raise ConfigurationError(f"--requests: {error}, or poisson:RATE_PER_S") from None
    try:
        return _rates(options, path) if columns == RATE_COLUMNS else _tokens(options, path)
    except RequestError as error:
        raise ConfigurationError(f"--requests: {error}") from None


def _poisson(options: RequestOptions, rate: str) -> Workload:
    _refuse(options, {"service_s"}, "with poisson:RATE_PER_S")
    try:
        rate_per_s = float(rate)
    except ValueError:
        rate_per_s = -1.0
    if not (rate_per_s > 0 and isfinite(rate_per_s)):
        raise ConfigurationError(
            f"--requests: {options.requests}: the rate must be a number of requests per second above 0, as in "
            "poisson:0.15"
        )
    service_s = _or(options.service_s, RateForm.service_s)
    described = {"form": _POISSON, "rate_per_s": rate_per_s, "service_s": service_s}
    return _workload(options, PoissonRequests(rate_per_s, service_s), described, ServingSettings.concurrency)


def _rates(options: RequestOptions, path: Path) -> Workload:
    _refuse(options, {"service_s", "request_scale", "request_cap"}, "with a trace of requests per minute")
    form = RateForm(
        _or(options.request_scale, RateForm.scale),
        _or(options.request_cap, RateForm.most_per_minute),
        _or(options.service_s, RateForm.service_s),
    )
    described = {
        "form": "requests per minute",
        "file": str(path),
        "request_scale": form.scale,
        "request_cap": form.most_per_minute,
        "service_s": form.service_s,
    }
    return _workload(options, read_rates(path, form), described, ServingSettings.concurrency)


def _tokens(options: RequestOptions, path: Path) -> Workload:
    _refuse(
        options, {"request_scale", "prefill_tokens_per_s", "decode_tokens_per_s"}, "with a trace of requests and tokens"
    )
    form = TokenForm(
        _or(options.request_scale, TokenForm.share),
        _or(options.prefill_tokens_per_s, TokenForm.prefill_per_s),
        _or(options.decode_tokens_per_s, TokenForm.decode_per_s),
    )
    if form.share > 1:
        raise ConfigurationError(
            f"--request-scale: {form.share:g}: a trace of single requests can only be thinned: give at most 1"
        )
    described = {
        "form": "tokens",
        "file": str(path),
        "request_scale": form.share,
        "prefill_tokens_per_s": form.prefill_per_s,
        "decode_tokens_per_s": form.decode_per_s,
    }
    return _workload(options, read_tokens(path, form), described, _TOKEN_CONCURRENCY)


def _workload(options: RequestOptions, source: RequestSource, described: dict[str, Any], concurrency: int) -> Workload:
    serving = ServingSettings(
        options.concurrency if options.concurrency is not None else concurrency,
        _or(options.timeout_s, ServingSettings.timeout_s),
    )
    described |= {"concurrency": serving.concurrency, "timeout_s": serving.timeout_s}
    return Workload(source, serving, described)


def _refuse(options: RequestOptions, known: set[str], when: str) -> None:
    """Refuses options that have no effect on this form of requests.

    `known` are the options of this form, except the options that every form has.
    """
    if options.requests is not None:
        known = known | {"requests", "concurrency", "timeout_s"}
    for name, value in vars(options).items():
        if value is not None and name not in known:
            flags = ", ".join(f"--{one.replace('_', '-')}" for one in sorted(known - {"requests"}))
            right = f"give {flags} only" if flags else "give --requests as well"
            raise ConfigurationError(f"--{name.replace('_', '-')}: {value:g}: has no effect {when}: {right}")


def _or(given: float | None, default: float) -> float:
    return default if given is None else given
