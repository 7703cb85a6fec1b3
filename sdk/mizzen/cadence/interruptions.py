"""How often the gang is interrupted, and who says so: the scheduler, the zone's hazard, or a platform's prior.

| variable | what |
| --- | --- |
| `MIZZEN_GANG_MTBF_S` | mean seconds between interruptions of the whole gang, by the scheduler |
| `MIZZEN_MACHINE_HAZARD_PER_H` | interruptions per machine hour that the zone has seen; 0: it has seen none |
| `MIZZEN_GANG_MACHINES` | machines of the gang; else `WORLD_SIZE` over `LOCAL_WORLD_SIZE`, else 1 |
| `MIZZEN_PLATFORM` | name of the platform prior (`PLATFORMS`) |
| `MIZZEN_ENDS_AT_S` | when the machines go for certain, in seconds since the epoch; else Slurm's `SLURM_JOB_END_TIME` |

One machine that goes takes the whole gang with it, so a gang of N machines is interrupted N times as often as one of
them. A time that is the gang's already is not divided again.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Literal, TypeAlias, TypeVar

Source: TypeAlias = Literal["scheduler", "hazard", "platform"]

GANG_MTBF = "MIZZEN_GANG_MTBF_S"
MACHINE_HAZARD = "MIZZEN_MACHINE_HAZARD_PER_H"
GANG_MACHINES = "MIZZEN_GANG_MACHINES"
PLATFORM = "MIZZEN_PLATFORM"
ENDS_AT = "MIZZEN_ENDS_AT_S"
SLURM_END = "SLURM_JOB_END_TIME"
SLURM_LEAD_S = 120.0
"""How long before Slurm's time limit its notice is told (`mizzen.notices`), after which a training saves and leaves."""

_HOUR_S = 3600.0
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Mtbf:
    """The mean time between interruptions of the whole gang."""

    mtbf_s: float
    source: Source
    why: str
    """Where the number comes from, as the end of a sentence."""


@dataclass(frozen=True)
class Prior:
    """What is assumed of a platform until somebody knows better."""

    hours: float
    """Mean hours between interruptions: of one machine, or of a gang of any size."""
    why: str
    of_gang: bool = False


UNKNOWN = "unknown"
PLATFORMS: Mapping[str, Prior] = {
    "on-demand": Prior(
        5000, "hardware fails: a published run on 2,048 machines saw one failure in 6,300 machine hours"
    ),
    "spot": Prior(24, "between a capacity crunch, some percent an hour, and a quiet zone, some percent a month"),
    "aws-spot": Prior(
        72, "between 3,300 h, where the worst published band begins (20% a month), and hours in a crunch"
    ),
    "gcp-spot": Prior(24, "no rates are published: as spot"),
    "gcp-preemptible": Prior(15, "as gcp-spot, and nothing lives longer than 24 hours: the mean of what comes first"),
    "azure-spot": Prior(20, "5% an hour, the end of the lowest published band"),
    "runpod-spot": Prior(12, "no rates are published; whoever pays more takes the machine: half of spot"),
    "vast-interruptible": Prior(6, "no rates are published; it is paused at once when outbid: a quarter of spot"),
    "slurm": Prior(24, "the usual time limit of a job, which ends the whole gang at once", of_gang=True),
    "kubernetes": Prior(168, "nodes are replaced by upgrades and scaling, about once a week"),
    UNKNOWN: Prior(24, "nobody said where this runs: as spot"),
}
"""The priors. An interval that is wrong by a factor k wastes (k + 1/k) / 2 times the least, to either side alike. So a
prior is in the middle of what is known, by ratio, and a factor of 4 in it, which is 2 in the interval, costs a quarter
more waste."""
OF_NOTICES: Mapping[str, str] = {
    "aws": "aws-spot",
    "gcp": "gcp-spot",
    "azure": "azure-spot",
    "runpod": "runpod-spot",
    "vast": "vast-interruptible",
    "mizzen": UNKNOWN,
    "sigterm": UNKNOWN,
}
"""Names of platforms by who gives notices there (`mizzen.notices`), which may be told or detected, and their priors."""


def mtbf(
    *,
    gang_mtbf_s: float | None = None,
    machine_hazard_per_h: float | None = None,
    machines: int = 1,
    platform: str | None = None,
) -> Mtbf:
    """The first that there is of the scheduler's word, the zone's hazard times the machines, and the platform's prior.

    Args:
        gang_mtbf_s: mean seconds between interruptions of the whole gang. Not divided by `machines`: it is the gang's.
        machine_hazard_per_h: interruptions per machine hour. With 0 none was seen yet, and the prior holds.
        machines: of the gang, 1 or more.
        platform: a name of `PLATFORMS`; None is `UNKNOWN`.

    Raises:
        ValueError: a number is out of its range, or there is no such platform; the message names it.
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
        return Mtbf(gang_mtbf_s, "scheduler", "as told for the whole gang, so not divided by its machines")
    if machine_hazard_per_h:
        found_s = _HOUR_S / (machine_hazard_per_h * machines)
        why = f"by {machine_hazard_per_h:g} interruptions per machine hour on {_machines(machines)}"
        return Mtbf(found_s, "hazard", why)
    name = platform or UNKNOWN
    prior = PLATFORMS[name]
    if prior.of_gang:
        return Mtbf(prior.hours * _HOUR_S, "platform", f"by the prior of {name} for a whole gang ({prior.why})")
    why = f"by the prior of {name}, {prior.hours:g} h for a machine, on {_machines(machines)} ({prior.why})"
    return Mtbf(prior.hours * _HOUR_S / machines, "platform", why)


def mtbf_of_environ(environ: Mapping[str, str] | None = None, *, platform: str | None = None) -> Mtbf:
    """The same from the environment's variables; an empty one counts as absent. `environ` defaults to `os.environ`.

    Args:
        environ: the variables.
        platform: what was detected, by its name here or in `mizzen.notices`; `MIZZEN_PLATFORM` wins over it.

    Raises:
        ValueError: a variable is not a number, out of its range, or names no platform; the message names it.
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
        machines=_gang_machines(given),
        platform=name or (platform and OF_NOTICES.get(platform, platform)),
    )


def ends_in_s_of_environ(environ: Mapping[str, str], now_s: float) -> float | None:
    """In how many seconds the machines go for certain, by the environment's variables; None: not known, or over.

    Args:
        environ: the variables.
        now_s: the time, in seconds since the epoch.

    Raises:
        ValueError: `MIZZEN_ENDS_AT_S` is no time. What Slurm set badly is not known.
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
    """The number in the variable `name`, None where it is absent or empty.

    Raises:
        ValueError: it is none, infinite, or not `right`; the message says `what` it must be.
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


def _gang_machines(given: Mapping[str, str]) -> int:
    told = number(given, GANG_MACHINES, int, lambda n: n >= 1, "a whole number of machines, 1 or more")
    if told is not None:
        return told
    # Other launchers set these too, and not always both.
    tasks = number(given, "WORLD_SIZE", int, lambda n: n >= 1, "a whole number, 1 or more")
    of_machine = number(given, "LOCAL_WORLD_SIZE", int, lambda n: n >= 1, "a whole number, 1 or more")
    return -(-tasks // of_machine) if tasks and of_machine else 1


def _machines(number: int) -> str:
    return f"{number} machine" if number == 1 else f"{number} machines"
