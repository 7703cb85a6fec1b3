"""The field `limits.retries`: a number of retries, or numbers by the cause of the end of an attempt."""

from typing import Any

from api.documents.forms import Field, Keys, cases, integer, map_of, section, text
from domain.patterns import whole_numbers
from domain.spec import LimitsSpec

_UNLIMITED, _OTHER = "unlimited", "other"
_MOST = 1000
_NUMBER = (int, float)
_LIMIT = f"must be an integer from 0 to {_MOST}, or {_UNLIMITED}"
_COUNT = cases({
    _NUMBER: integer(0, _MOST), str: text(f"a number, or {_UNLIMITED}", 100, f"^{_UNLIMITED}$", _LIMIT),
}, f"{_LIMIT}, it is {{}}")  # fmt: skip
_STATUS = Keys(f"^({whole_numbers(1, 255)}|{_OTHER})$", f"must be an exit status from 1 to 255, or {_OTHER}", {})
_CAUSES = {"preempted": "max_preemptions", "lost": "max_losses"}


def _by_cause(given: dict[str, Any]) -> dict[str, Any]:
    exits = {status: None if count == _UNLIMITED else count for status, count in given.pop("exit", {}).items()}
    others = {_CAUSES[cause]: None if count == _UNLIMITED else count for cause, count in given.items()}
    return others | {"retries": exits.pop(_OTHER, 0), "retries_by_exit": exits}


RETRIES = Field(
    cases({
        _NUMBER: integer(0, _MOST).to(lambda number: {"retries": number}),
        dict: section({
            "exit": Field(map_of(_STATUS, _COUNT, "a mapping of exit statuses to numbers of retries", 256),
                          "Exit status to the number of retries after it; a signal counts as 128 and its number, and "
                          f"{_OTHER} means all statuses that are not listed (default: 0)"),
            "preempted": Field(_COUNT, f"Restarts after preemptions; default: {_UNLIMITED}"),
            "lost": Field(_COUNT, f"Restarts after losses of machines; default: {_UNLIMITED}"),
        }).to(_by_cause),
    }, f"must be an integer from 0 to {_MOST}, or a mapping with exit, preempted and lost, it is {{}}"),
    "Retries after failures of the tasks themselves, or numbers of retries by cause", "", default=0,
)  # fmt: skip


def retries_of(limits: LimitsSpec) -> dict[str, Any]:
    """Returns the field as in a document: a number if that is sufficient, else a mapping; nothing for the default."""
    causes = {cause: getattr(limits, name) for cause, name in _CAUSES.items()}
    found = {cause: count for cause, count in causes.items() if count is not None}
    if not found and not limits.retries_by_exit and limits.retries is not None:
        return {"retries": limits.retries} if limits.retries else {}
    exits = {**limits.retries_by_exit, _OTHER: limits.retries}
    return {"retries": {"exit": {s: _UNLIMITED if n is None else n for s, n in exits.items()}, **found}}
