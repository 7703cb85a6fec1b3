"""The command `cadence`, which computes and explains the interval between checkpoints."""

from argparse import Namespace
from collections.abc import Callable
from math import isfinite
from typing import Any

from mizzen.cadence.choice import choose
from mizzen.cadence.interruptions import PLATFORMS, mtbf
from mizzen.cli.exits import Exit
from mizzen.cli.parser import Parser
from mizzen.cli.printer import emit_one
from mizzen.cli.values import duration, finite, whole

_HELP = """\
Explain how often to save a checkpoint.

The rate of interruptions is taken from --mtbf, else from --hazard times --machines, else from the default for
--platform. --mtbf applies to the whole gang and is not divided by --machines.

    mizzen cadence --mtbf 3h --save 30s --step 2s"""


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
    body = {
        **chosen._asdict(),
        "mtbf": chosen.mtbf._asdict(),
        "overhead": overhead,
        "sentences": list(chosen.sentences()),
    }
    emit_one(given, body, lambda: "\n".join(chosen.sentences()), name=str(chosen.steps))
    return Exit.OK


_ZERO, _ABOVE = duration(above_zero=False), duration(above_zero=True)
_HAZARD = "a number of interruptions per machine hour, more than 0, such as 0.02"


def cadence() -> Parser:
    """Return the parser of the command."""
    parser = Parser(prog="mizzen cadence", description=_HELP)

    def time(flag: str, read: Callable[[str], float], text: str, **more: Any) -> None:
        parser.add_argument(
            f"--{flag}", dest=f"{flag.replace('-', '_')}_s", type=read, metavar="DURATION", help=text, **more
        )

    time("save", _ZERO, "How long a save stalls the training.", required=True)
    time("step", _ABOVE, "How long one step takes.", required=True)
    time("mtbf", _ABOVE, "Mean time between interruptions of the whole gang.")
    time("ends-in", _ABOVE, "Time until the machines certainly end, as at a time limit.")
    parser.add_argument(
        "--hazard", type=finite(_HAZARD, above_zero=True), metavar="NUMBER", help="Interruptions per machine hour."
    )
    parser.add_argument(
        "--platform", choices=tuple(PLATFORMS), metavar="NAME",
        help=f"The platform, for its default rate of interruptions: {', '.join(PLATFORMS)}.",
    )  # fmt: skip
    parser.add_argument(
        "--machines", type=whole(1), default=1, metavar="NUMBER", help="Number of machines of the gang. Default: 1."
    )
    time("interval", _ZERO, "A fixed interval, instead of the computed one.")
    time("write", _ZERO, "How long a save is written in the background after the stall. Default: 0.", default=0.0)
    return parser.runs(_run)
