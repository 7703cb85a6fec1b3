"""The command `cadence`, which computes and explains the interval between checkpoints."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite

from mizzen.cadence.choice import choose
from mizzen.cadence.interruptions import PLATFORMS, mtbf
from mizzen.cli.exits import Exit
from mizzen.cli.plain.printing import emit_one
from mizzen.cli.plain.spec import BadValue, Command, Option, choice, duration, whole

_HELP = """\
Explain how often to save a checkpoint.

The rate of interruptions is taken from --mtbf, else from --hazard times --machines, else from the default for
--platform. --mtbf applies to the whole gang and is not divided by --machines.

    mizzen cadence --mtbf 3h --save 30s --step 2s"""


def _hazard(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number > 0 and isfinite(number)):
        raise BadValue(f"{text!r} must be a number of interruptions per machine hour, more than 0, such as 0.02")
    return number


def _time(flag: str, name: str, read: Callable[[str], float], text: str, **more: object) -> Option:
    return Option((flag,), name, text, read, "DURATION", **more)  # type: ignore[arg-type]


def _run(given: Namespace) -> int:
    found = mtbf(
        gang_mtbf_s=given.mtbf_s,
        machine_hazard_per_h=given.hazard,
        machines=given.machines,
        platform=given.platform,
    )
    chosen = choose(
        found,
        given.save_s,
        given.step_s,
        interval_s=given.interval_s,
        write_s=given.write_s,
        ends_in_s=given.ends_in_s,
    )
    overhead = chosen.overhead if isfinite(chosen.overhead) else None
    body = {**asdict(chosen), "overhead": overhead, "sentences": list(chosen.sentences())}
    emit_one(given.output, body, lambda: "\n".join(chosen.sentences()), name=str(chosen.steps))
    return Exit.OK


_NAMES = tuple(PLATFORMS)
_ZERO, _ABOVE = duration(above_zero=False), duration(above_zero=True)
CADENCE = Command(
    "cadence",
    _HELP,
    _run,
    (
        _time("--save", "save_s", _ZERO, "How long a save stalls the training.", required=True),
        _time("--step", "step_s", _ABOVE, "How long one step takes.", required=True),
        _time("--mtbf", "mtbf_s", _ABOVE, "Mean time between interruptions of the whole gang."),
        _time("--ends-in", "ends_in_s", _ABOVE, "Time until the machines certainly end, as at a time limit."),
        Option(("--hazard",), "hazard", "Interruptions per machine hour.", _hazard, "NUMBER"),
        Option(
            ("--platform",),
            "platform",
            f"The platform, for its default rate of interruptions: {', '.join(_NAMES)}.",
            choice(_NAMES),
            "NAME",
            choices=_NAMES,
        ),
        Option(("--machines",), "machines", "Number of machines of the gang. Default: 1.", whole(1), "NUMBER", 1),
        _time("--interval", "interval_s", _ZERO, "A fixed interval, instead of the computed one."),
        _time(
            "--write", "write_s", _ZERO, "How long a save is then written in the background. Default: 0.", default=0.0
        ),
    ),
)
