"""Formats times, sizes and other values for people, and parses sizes."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mizzen.cli.amounts import between, duration, instant, size, visible

__all__ = ["between", "duration", "instant", "size", "visible"]
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGTP]?)(i?)B?")


def ago(text: str | None) -> str | None:
    """Format the time since `text` as `3m ago`."""
    return None if text is None else f"{between(text, None)} ago"


def until(text: str) -> str:
    """Format the time from now to `text` as `3d 2h`."""
    return duration((instant(text) - datetime.now(UTC)).total_seconds())


def ahead(interval: Mapping[str, Any] | None) -> str | None:
    """Format an interval of times as the time from now to its ends: `2h 10m..9h 5m`."""
    return None if interval is None else f"{until(interval['earliest'])}..{until(interval['latest'])}"


def is_ahead(text: str) -> bool:
    """Return whether the time `text` is in the future."""
    return instant(text) > datetime.now(UTC)


def clock(text: str) -> str:
    """Format a time as local date and time with seconds."""
    return instant(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def hours(amount: float) -> str:
    """Format hours as `1,234.5`, or with four decimals below 1."""
    return f"{amount:,.1f}" if amount >= 1 else f"{amount:.4f}"


def usd(amount: float | None) -> str | None:
    """Format US dollars as `$12.30`, or with four decimals below one cent."""
    if amount is None:
        return None
    return f"${amount:,.2f}" if amount >= 0.01 or not amount else f"${amount:.4f}"


def bytes_of(text: str) -> int:
    """Return the bytes of a size such as `512MiB` (powers of 1024), `5PB` (powers of 1000) or `4096`.

    Raises:
        ValueError: `text` is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is not a size such as 512MiB, 5PB or a number of bytes")
    power = " KMGTP".index(found[2]) if found[2] else 0
    return round(float(found[1]) * float((1024 if found[3] else 1000) ** power))


def pairs(mapping: Mapping[str, Any] | None) -> str:
    """Format a mapping as `a=1,b=2`, sorted by key."""
    return ",".join(f"{key}={value}" for key, value in sorted((mapping or {}).items()))


def reason(body: Mapping[str, Any] | None) -> str | None:
    """Format a reason as `code: sentence`."""
    return None if body is None else f"{body['code']}: {body.get('sentence') or body.get('detail')}"


def resources(body: Mapping[str, Any]) -> str:
    """Format the resources of one task as `a100|h100:8, 4 cpus, 2.0 GiB`."""
    parts = []
    if body.get("gpus"):
        parts.append(f"{'|'.join(body.get('gpu_types') or ['gpu'])}:{body['gpus']}")
    if body.get("cpus") is not None:
        parts.append(plural(body["cpus"], "cpu"))
    if body.get("memory_bytes") is not None:
        parts.append(str(size(body["memory_bytes"])))
    return ", ".join(parts)


def plural(number: float, noun: str) -> str:
    """Format a number with a noun: `1 task`, `2 tasks`, `0.5 cpus`."""
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
