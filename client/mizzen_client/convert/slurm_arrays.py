"""`--array`, `--dependency` and `--begin` of batch scripts."""

import re
from dataclasses import dataclass, field
from typing import Any

from mizzen_client.convert.conversion import CannotConvert, Conversion
from mizzen_client.convert.quantities import duration_text
from mizzen_client.convert.slurm_options import SlurmOption

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_MOST_ELEMENTS = 100_000
_AFTER = re.compile(r"(after|afterany|afterok|afternotok|aftercorr|afterburstbuffer):(.+)")
_JOB = re.compile(r"([A-Za-z0-9_$%{}.-]{1,60})(?:\+([0-9]+))?")
_CONDITIONS = {"after": "started", "afterany": "ended", "afterok": "succeeded", "afternotok": "failed",
               "aftercorr": "succeeded", "afterburstbuffer": "ended"}  # fmt: skip
_LATER = re.compile(r"now\+([0-9]{1,7})(second|minute|hour|day|week)?s?")
_LATER_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 7 * 86400}
_AT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:T[0-9]{2}:[0-9]{2}(?::[0-9]{2})?)?")


@dataclass
class Elements:
    """The elements of an array, and the variables of each."""

    array: dict[str, Any]
    """The field `array` of the document."""
    variables: dict[str, str] = field(default_factory=dict)
    """Slurm's variables to values in a shell."""


def elements_of(conversion: Conversion, option: SlurmOption) -> Elements:
    """Return the array of an option such as `0-15%4`, `1,3,5` or `0-90:10`.

    Raises:
        CannotConvert: the value is not a list of indexes.
    """
    listed, percent, throttle = option.value.partition("%")
    found = [_RANGE.fullmatch(part.strip()) for part in listed.split(",")]
    if None in found or (percent and not re.fullmatch("[1-9][0-9]{0,5}", throttle)):
        raise CannotConvert(
            option.line, f"{option.text}: write indexes such as 0-15, 1,3,5 or 0-90:10, then %4 for a limit"
        )
    ranges = []
    for match in found:
        assert match is not None
        low, high, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if high < low or step < 1:
            raise CannotConvert(option.line, f"{option.text}: {match[0]} has no index; write the lower number first")
        ranges.append(range(low, high + 1, step))
    count = sum(len(one) for one in ranges)
    first, last = min(one[0] for one in ranges), max(one[-1] for one in ranges)
    if count > _MOST_ELEMENTS:
        raise CannotConvert(option.line, f"{option.text}: {count} elements; an array has at most {_MOST_ELEMENTS}")
    conversion.carried(option.line, option.text, "array")
    names = {"MIN": first, "MAX": last, "COUNT": count, "STEP": ranges[0].step}
    variables = {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in names.items()}
    limit = {"throttle": int(throttle)} if percent else {}
    indexes = {"indexes": listed.replace(" ", "")}
    return Elements({**indexes, **limit}, {**variables, "SLURM_ARRAY_TASK_ID": '"$MIZZEN_ARRAY_INDEX"'})


def dependencies_of(conversion: Conversion, option: SlurmOption, name: str, *, is_array: bool) -> list[dict[str, Any]]:
    """Return the field `after` of the workload `name` for an option such as `afterok:123:124,afterany:125`.

    Raises:
        CannotConvert: the value is not a list of dependencies.
    """
    found = []
    for part in re.split(r"[,?]", option.value):
        if part == "singleton":
            found.append({"workload": name, "condition": "ended"})
            why = "it waits for the newest workload of its name: leave it out of the first one"
            conversion.changed(option.line, f"--dependency={part}", "after", why)
            continue
        match = _AFTER.fullmatch(part)
        jobs = [_JOB.fullmatch(job) for job in match[2].split(":")] if match else []
        if match is None or None in jobs:
            raise CannotConvert(
                option.line, f"{option.text}: write afterok:JOB, afterany:JOB, afternotok:JOB or after:JOB"
            )
        for job in jobs:
            assert job is not None
            other = f"slurm-{re.sub(r'[^a-z0-9]+', '-', job[1].lower()).strip('-')}"
            each: dict[str, Any] = {"same_index": True} if match[1] == "aftercorr" and is_array else {}
            found.append({"workload": other, "condition": _CONDITIONS[match[1]], **each})
            why = f"after[{len(found) - 1}].workload: write the workload that replaces job {job[1]} instead of {other}"
            conversion.lost(option.line, f"--dependency={match[1]}:{job[0]}", why)
    if "?" in option.value:
        conversion.lost(option.line, option.text, "one of several conditions cannot be said: all of `after` must hold")
    return found


def not_before_of(conversion: Conversion, option: SlurmOption) -> str | None:
    """Return the field `not_before` for a date or `now+1hour`, or None with a remark."""
    if later := _LATER.fullmatch(option.value):
        conversion.carried(option.line, option.text, "not_before")
        return duration_text(int(later[1]) * _LATER_S[later[2] or "second"])
    if not _AT.fullmatch(option.value):
        why = "a document needs a date: write it into `not_before`, such as 2026-01-31T20:00:00Z"
        conversion.lost(option.line, option.text, why)
        return None
    day, _, clock = option.value.partition("T")
    clock = clock or "00:00:00"
    conversion.changed(option.line, option.text, "not_before", "the time is in UTC, and was in the cluster's time zone")
    return f"{day}T{clock if len(clock) == 8 else f'{clock}:00'}Z"
