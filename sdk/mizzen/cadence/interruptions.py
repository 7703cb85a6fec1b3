"""Determines how often the gang is interrupted: from the scheduler, a measured hazard, or the prior of a platform.

| variable | meaning |
| --- | --- |
| `MIZZEN_GANG_MTBF_S` | mean seconds between interruptions of the whole gang, from the scheduler |
| `MIZZEN_MACHINE_HAZARD_PER_H` | measured interruptions per machine hour; 0: none were measured |
| `MIZZEN_GANG_MACHINES` | number of machines of the gang; else `WORLD_SIZE` / `LOCAL_WORLD_SIZE`, else 1 |
| `MIZZEN_PLATFORM` | name of the platform, for its prior (`PLATFORMS`) |
| `MIZZEN_ENDS_AT_S` | when the machines certainly end, in seconds since the epoch; else Slurm's `SLURM_JOB_END_TIME` |

The end of one machine interrupts the whole gang, so a gang of N machines is interrupted N times as often as a single
machine. A mean time that applies to the whole gang is not divided by N.
"""

import os
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Literal, NamedTuple, TypeAlias, TypeVar

Source: TypeAlias = Literal["scheduler", "hazard", "platform"]

GANG_MTBF = "MIZZEN_GANG_MTBF_S"
MACHINE_HAZARD = "MIZZEN_MACHINE_HAZARD_PER_H"
GANG_MACHINES = "MIZZEN_GANG_MACHINES"
PLATFORM = "MIZZEN_PLATFORM"
ENDS_AT = "MIZZEN_ENDS_AT_S"
SLURM_END = "SLURM_JOB_END_TIME"
SLURM_LEAD_S = 120.0
"""The time between the notice and Slurm's time limit (`mizzen.notices`). After the notice, trainings save and exit."""

_HOUR_S = 3600.0
_Number = TypeVar("_Number", int, float)


class Mtbf(NamedTuple):
    """The mean time between interruptions of the whole gang."""

    mtbf_s: float
    source: Source
    why: str
    """The source of the number, as the end of a sentence."""


class Prior(NamedTuple):
    """The default mean time between interruptions of a platform, used until a better value is known."""

    hours: float
    """Mean hours between interruptions: of one machine, or of a gang of any size."""
    why: str
    of_gang: bool = False


UNKNOWN = "unknown"
PLATFORMS: Mapping[str, Prior] = {
    "on-demand": Prior(
        5000, "hardware fails: a published run on 2,048 machines saw one failure in 6,300 machine hours"
    ),
    "spot": Prior(24, "between a few percent an hour in a capacity shortage and a few percent a month in a quiet zone"),
    "aws-spot": Prior(
        72, "between 3,300 h, the start of the worst published band (20% a month), and hours in a shortage"
    ),
    "gcp-spot": Prior(24, "no rates are published: as spot"),
    "gcp-preemptible": Prior(
        15, "as gcp-spot, but a machine lives at most 24 hours: the mean time to the first of the two"
    ),
    "azure-spot": Prior(20, "5% an hour, the upper end of the lowest published band"),
    "runpod-spot": Prior(12, "no rates are published; a higher bid takes the machine: half of spot"),
    "vast-interruptible": Prior(
        6, "no rates are published; a machine is paused at once when outbid: a quarter of spot"
    ),
    "slurm": Prior(24, "the usual time limit of a job, which ends the whole gang at once", of_gang=True),
    "kubernetes": Prior(168, "nodes are replaced by upgrades and scaling, about once a week"),
    UNKNOWN: Prior(24, "the platform is not known: as spot"),
}
"""The prior of each platform, by its name.

An interval that is wrong by a factor k, in either direction, wastes (k + 1/k) / 2 times the minimum. So a prior is the
geometric middle of the known range. If it is wrong by a factor of 4, the interval is wrong by a factor of 2 and wastes
a quarter more.
"""
OF_NOTICES: Mapping[str, str] = {
    "aws": "aws-spot",
    "gcp": "gcp-spot",
    "azure": "azure-spot",
    "runpod": "runpod-spot",
    "vast": "vast-interruptible",
    "mizzen": UNKNOWN,
    "sigterm": UNKNOWN,
}
"""Maps a platform name of `mizzen.notices`, which may be set or detected, to the name of its prior in `PLATFORMS`."""


def mtbf(
    *,
    gang_mtbf_s: float | None = None,
    machine_hazard_per_h: float | None = None,
    machines: int = 1,
    platform: str | None = None,
) -> Mtbf:
    """Return the mean time between interruptions of the gang, from the first source that is given.

    The sources are, in this order: `gang_mtbf_s`, `machine_hazard_per_h` times `machines`, and the prior of `platform`.

    Args:
        gang_mtbf_s: mean seconds between interruptions of the whole gang. It is not divided by `machines`.
        machine_hazard_per_h: interruptions per machine hour. 0: none were measured, and the prior is used.
        machines: number of machines of the gang, 1 or more.
        platform: a name of `PLATFORMS`; None: `UNKNOWN`.

    Raises:
        ValueError: a number is out of its range, or there is no such platform. The message names it.
    """
    if machines < 1:
        raise ValueError(f"machines={machines}: must be a whole number, 1 or more")
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r}: must be one of {', '.join(PLATFORMS)}")
    if machine_hazard_per_h is not None and not (machine_hazard_per_h >= 0 and isfinite(machine_hazard_per_h)):
        raise ValueError(f"machine_hazard_per_h={machine_hazard_per_h}: must be 0 or more interruptions per hour")
    if gang_mtbf_s is not None:
        if not (gang_mtbf_s > 0 and isfinite(gang_mtbf_s)):
            raise ValueError(f"gang_mtbf_s={gang_mtbf_s}: must be a number of seconds, more than 0")
        return Mtbf(gang_mtbf_s, "scheduler", "as given for the whole gang, so not divided by its machines")
    if machine_hazard_per_h:
        found_s = _HOUR_S / (machine_hazard_per_h * machines)
        why = f"from {machine_hazard_per_h:g} interruptions per machine hour on {_machines(machines)}"
        return Mtbf(found_s, "hazard", why)
    name = platform or UNKNOWN
    prior = PLATFORMS[name]
    if prior.of_gang:
        return Mtbf(prior.hours * _HOUR_S, "platform", f"from the prior of {name} for a whole gang ({prior.why})")
    why = f"from the prior of {name}, {prior.hours:g} h for a machine, on {_machines(machines)} ({prior.why})"
    return Mtbf(prior.hours * _HOUR_S / machines, "platform", why)


def mtbf_of_environ(environ: Mapping[str, str] | None = None, *, platform: str | None = None) -> Mtbf:
    """Return the mean time between interruptions of the gang, as `mtbf`, from environment variables.

    Args:
        environ: the variables; None: `os.environ`. An empty value counts as absent.
        platform: the detected platform, by its name here or in `mizzen.notices`. `MIZZEN_PLATFORM` takes precedence.

    Raises:
        ValueError: a variable is not a number, out of its range, or not a platform. The message names the variable.
    """
    given = os.environ if environ is None else environ
    name = given.get(PLATFORM)
    if name:
        name = OF_NOTICES.get(name, name)
    if name and name not in PLATFORMS:
        raise ValueError(f"{PLATFORM}={name!r}: must be one of {', '.join(PLATFORMS)}")
    return mtbf(
        gang_mtbf_s=number(given, GANG_MTBF, float, lambda n: n > 0, "a number of seconds, more than 0"),
        machine_hazard_per_h=number(given, MACHINE_HAZARD, float, lambda n: n >= 0, "0 or more interruptions per hour"),
        machines=gang_machines(given),
        platform=name or (platform and OF_NOTICES.get(platform, platform)),
    )


def ends_in_s_of_environ(environ: Mapping[str, str], now_s: float) -> float | None:
    """Return the seconds until the machines certainly end, from environment variables; None: not known, or in the past.

    An invalid `SLURM_JOB_END_TIME` is ignored.

    Args:
        environ: the variables.
        now_s: the current time, in seconds since the epoch.

    Raises:
        ValueError: `MIZZEN_ENDS_AT_S` is not a time.
    """
    ends_at_s = number(environ, ENDS_AT, float, lambda n: n > 0, "a time in seconds since the epoch")
    if ends_at_s is None:
        try:
            ends_at_s = number(environ, SLURM_END, float, lambda n: n > 0, "a time in seconds since the epoch")
        except ValueError:
            ends_at_s = None
        if ends_at_s is not None:
            ends_at_s -= SLURM_LEAD_S
    return ends_at_s - now_s if ends_at_s is not None and ends_at_s > now_s else None


def number(
    given: Mapping[str, str], name: str, kind: Callable[[str], _Number], right: Callable[[_Number], bool], what: str
) -> _Number | None:
    """Return the number in the variable `name`, or None if it is absent or empty.

    Args:
        given: the variables.
        name: the name of the variable.
        kind: parses the text.
        right: returns whether the number is valid.
        what: what the value must be, for the error message.

    Raises:
        ValueError: the value is not a number, is infinite, or is not `right`.
    """
    if not given.get(name):
        return None
    try:
        found = kind(given[name])
        fits = isfinite(found) and right(found)
    except (ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{name}={given[name]!r}: must be {what}")
    return found


def gang_machines(given: Mapping[str, str]) -> int:
    """Return the number of machines of the gang, from environment variables."""
    told = number(given, GANG_MACHINES, int, lambda n: n >= 1, "a whole number of machines, 1 or more")
    if told is not None:
        return told
    # Other launchers set these variables too, but not always both.
    tasks = number(given, "WORLD_SIZE", int, lambda n: n >= 1, "a whole number, 1 or more")
    of_machine = number(given, "LOCAL_WORLD_SIZE", int, lambda n: n >= 1, "a whole number, 1 or more")
    return -(-tasks // of_machine) if tasks and of_machine else 1


def _machines(number: int) -> str:
    return f"{number} machine" if number == 1 else f"{number} machines"
