"""Reads and checks the values in a request: signals, results and heartbeats.

Workflows decode these values, and store some in columns and in JSONB. A value that cannot be decoded or stored would
block its workflow for ever. So the gateway decodes each value as the type that the receiver expects, checks what
Postgres cannot store, and encodes it again: the receiver decodes exactly what was checked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from temporalio.api.common.v1 import Payload, Payloads

from domain.ids import NAME_RULE, is_name
from domain.protocol.machines import TaskExit
from domain.task_reports import LoadReport, LoadState, TaskProgress
from infra.payloads import DATA_CONVERTER
from proxies.gateway.refusals import malformed

_JSON = b"json/plain"
_MAX_TEXT = 8192
"""Maximum number of characters of a text in a value."""
_MAX_WHOLE = (1 << 63) - 1
_LATEST_S = 253402300799.0
"""The end of the year 9999 in epoch seconds: Python and Postgres have no later time."""
_MAX_NAMED = 200
"""Maximum number of characters of a refused value that a message repeats."""


def value(field: str, payloads: Payloads, kind: type[Any]) -> Any:
    """Returns the only value in `payloads`, decoded as `kind` and checked.

    Raises:
        Refused: there is not exactly one, it is not JSON of this type, or Postgres cannot store it.
    """
    if len(payloads.payloads) != 1:
        raise malformed(f"{field}: has {len(payloads.payloads)} values; must have one")
    payload: Payload = payloads.payloads[0]
    if payload.metadata.get("encoding") != _JSON:
        raise malformed(f"{field}: encoding {payload.metadata.get('encoding')!r}; must be {_JSON.decode()}")
    try:
        decoded = DATA_CONVERTER.payload_converter.from_payloads([payload], [kind])[0]
    except Exception as error:  # The errors of pydantic, of JSON and of the SDK have no common type.
        raise malformed(f"{field}: must be a {kind.__name__} as JSON: {named(str(error))}") from None
    _check(field, decoded)
    return decoded


def encoded(checked: Any) -> Payloads:
    """Encodes a checked value.

    The caller's own JSON is not passed on: it may contain a field twice, of which only one was checked.
    """
    return Payloads(payloads=DATA_CONVERTER.payload_converter.to_payloads([checked]))


def named(text: str) -> str:
    """Returns a value for a message: shortened, and on one line, because messages are also logged."""
    short = text if len(text) <= _MAX_NAMED else f"{text[:_MAX_NAMED]}..."
    return "".join(char if char.isprintable() else " " for char in short)


def _check(field: str, given: Any) -> None:
    """Checks a value and all values in it.

    Raises:
        Refused: a text, number, time or state in it is not valid.
    """
    match given:
        case str():
            _check_text(field, given)
        case int():
            if abs(given) > _MAX_WHOLE:
                raise malformed(f"{field}: has more than 64 bits; must be between -{_MAX_WHOLE} and {_MAX_WHOLE}")
        case float():
            if not math.isfinite(given):
                raise malformed(f"{field}: {given}; must be a finite number")
            if field.endswith(("at_s", "since_s")) and not 0 <= given <= _LATEST_S:
                raise malformed(f"{field}: {given:g}; must be seconds since the epoch, at most {_LATEST_S:.0f}")
        case Mapping():
            for key, one in given.items():
                _check_text(f"{field}: a key", key)
                _check(f"{field}[{named(key)!r}]", one)
        case Sequence():
            for index, one in enumerate(given):
                _check(f"{field}[{index}]", one)
        case _ if is_dataclass(given):
            for part in fields(given):
                _check(f"{field}.{part.name}", getattr(given, part.name))
            if isinstance(given, LoadReport) and given.state not in list(LoadState):
                raise malformed(f"{field}.state: {named(given.state)}; must be one of {', '.join(LoadState)}")
            if isinstance(given, TaskProgress):
                _check_measured(field, given)
            if isinstance(given, TaskExit | TaskProgress) and not (is_name(given.job) and given.task >= 0):
                task = f"{named(given.job)}/{given.task}"
                raise malformed(f"{field}: task {task}; must be the name of a job ({NAME_RULE}) and a task's number")


def _check_measured(field: str, given: TaskProgress) -> None:
    """Checks that no size, step or duration is negative: plans are computed from them."""
    for name, one in ((field, given), (f"{field}.cadence", given.cadence), (f"{field}.load", given.load)):
        for part in fields(one) if one is not None else ():
            number = getattr(one, part.name)
            if isinstance(number, int | float) and number < 0:
                raise malformed(f"{name}.{part.name}: {number:g}; must be 0 or more")


def _check_text(field: str, text: str) -> None:
    if "\0" in text:
        raise malformed(f"{field}: contains the character U+0000; must not contain it")
    if len(text) > _MAX_TEXT:
        raise malformed(f"{field}: has {len(text)} characters; must be at most {_MAX_TEXT}")
