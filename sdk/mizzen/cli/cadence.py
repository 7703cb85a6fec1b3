"""The command that explains how often to save."""

from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from typing import Any, TypeVar

import click

from mizzen.cadence.choice import choose
from mizzen.cadence.interruptions import PLATFORMS, mtbf
from mizzen.cli.durations import duration
from mizzen.cli.output import emit_one
from mizzen.cli.session import Command, Session

_NAMES = ", ".join(PLATFORMS)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _hazard(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Option callback: interruptions per machine hour."""
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number > 0 and isfinite(number)):
        right = "a number of interruptions per machine hour, more than 0, such as 0.02"
        raise click.BadParameter(f"{text!r} must be {right}", context, parameter)
    return number


def _time(name: str, variable: str, above_zero: bool, text: str, **more: Any) -> Callable[[_Function], _Function]:
    return click.option(name, variable, callback=duration(above_zero), metavar="DURATION", help=text, **more)


@click.command(cls=Command)
@_time("--save", "save_s", False, "How long a save holds the training up.", required=True)
@_time("--step", "step_s", True, "How long one step takes.", required=True)
@_time("--mtbf", "mtbf_s", True, "Mean time between interruptions of the whole gang.")
@click.option("--hazard", callback=_hazard, metavar="NUMBER", help="Interruptions per machine hour.")
@click.option("--platform", type=click.Choice(tuple(PLATFORMS)), metavar="NAME", help=f"Where it runs: {_NAMES}.")
@click.option("--machines", type=click.IntRange(min=1), default=1, show_default=True, help="Machines of the gang.")
@_time("--interval", "interval_s", False, "An interval that is set outright: no formula.")
@_time("--write", "write_s", False, "How long a save is then written in the background.", default="0s")
@click.pass_obj
def cadence(
    session: Session,
    save_s: float,
    step_s: float,
    mtbf_s: float | None,
    hazard: float | None,
    platform: str | None,
    machines: int,
    interval_s: float | None,
    write_s: float,
) -> None:
    r"""Explain how often to save.

    Interruptions are taken from --mtbf, else from --hazard times --machines, else from what is assumed of --platform.
    A --mtbf is the whole gang's and is not divided by --machines.

    \b
    mizzen cadence --mtbf 3h --save 30s --step 2s
    """
    found = mtbf(gang_mtbf_s=mtbf_s, machine_hazard_per_h=hazard, machines=machines, platform=platform)
    choice = choose(found, save_s, step_s, interval_s=interval_s, write_s=write_s)
    overhead = choice.overhead if isfinite(choice.overhead) else None
    body = {**asdict(choice), "overhead": overhead, "sentences": list(choice.sentences())}
    emit_one(session, body, lambda: "\n".join(choice.sentences()), name=str(choice.steps))
