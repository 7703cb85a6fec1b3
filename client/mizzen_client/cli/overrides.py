"""Changes of a document by options of the command line: `--set`, `--env`, `--tasks`, `--after`, `--label` and others.

The API checks the result. Here only a field that the document cannot have is an error.
"""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from mizzen_client.cli.session import complete_tenant, complete_workload, label_option

_TASKS = re.compile("([0-9]{1,9})(?::([0-9]{1,9}))?")
TASKS_SHOWN = "NUMBER[:MOST]"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Overrides:
    """The changes that the options make in each document."""

    tenant: str | None = None
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    tasks: "int | dict[str, int] | None" = None
    """A number, or the fewest and the most as `min` and `max`."""
    array: str | None = None
    after: tuple[str, ...] = ()
    """Dependencies that are added to those of the document."""
    not_before: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    """Pairs of a path, such as `jobs.0.run`, and a value."""

    def applied(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a changed copy of a document.

        Raises:
            click.UsageError: a path of `--set` leads nowhere, or `--tasks` is given for several jobs.
        """
        out = deepcopy(dict(body))
        for path, value in self.settings:
            _set(out, path, value)
        given = {"tenant": self.tenant, "name": self.name, "not_before": self.not_before}
        out |= {key: value for key, value in given.items() if value is not None}
        if self.after:
            before = out.get("after") or []
            out["after"] = [*before, *self.after] if isinstance(before, list) else before
        if self.array is not None:
            _set_array(out, self.array)
        # If a section does not have the form that it must have, the API rejects the document.
        if self.labels:
            _merge(out, "labels", self.labels)
        jobs = [job for job in out["jobs"] if isinstance(job, dict)] if isinstance(out.get("jobs"), list) else []
        if self.env:
            for job in jobs:
                _merge(job, "env", self.env)
        if self.tasks is not None and jobs:
            if len(jobs) > 1:
                value = str(self.tasks).replace("'", "")
                message = f"--tasks: the document has {len(jobs)} jobs; use --set 'jobs.NUMBER.tasks={value}'"
                raise click.UsageError(message)
            jobs[0]["tasks"] = self.tasks
        return out


def tasks_of(value: Any) -> "int | dict[str, int]":
    """Return the field `tasks` of a job from a number or a range: `4`, `2:16`. It is the type of an option of click.

    Raises:
        click.BadParameter: it is neither.
    """
    if not isinstance(value, str):
        return value  # type: ignore[no-any-return]
    match = _TASKS.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value!r} must be a number, such as 4, or the fewest and the most, such as 2:16")
    fewest, most = int(match[1]), int(match[2] or match[1])
    if fewest < 1:
        raise click.BadParameter(f"{value!r}: must be at least 1 task, not {fewest}")
    if most < fewest:
        raise click.BadParameter(f"{value!r}: the most tasks, {most}, must be at least the fewest, {fewest}")
    return fewest if match[2] is None else {"min": fewest, "max": most}


def override_options(command: F) -> F:
    """Add the options of `Overrides`. Each argument has the name of its field; that of `labels` is `labels_`."""
    for option in reversed(
        (
            click.option("--tenant", shell_complete=complete_tenant, help="Use this tenant instead of the document's."),
            click.option("--name", help="Use this name instead of the document's."),
            label_option("Add a label"),
            env_option,
            click.option(
                "--tasks",
                type=tasks_of,
                metavar=TASKS_SHOWN,
                help="Use this number of tasks, or the fewest and the most: 2:16.",
            ),
            array_option,
            after_option,
            not_before_option,
            click.option(
                "--set",
                "settings",
                multiple=True,
                callback=_pairs,
                metavar="PATH=VALUE",
                help="Set a field of the document, such as jobs.0.run=..., to a value in YAML (repeatable).",
            ),
        )
    ):
        command = option(command)
    return command


def _variables(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Option callback: convert repeated `NAME=VALUE` to a mapping; `NAME` alone takes this shell's value."""
    import os

    out = {}
    for given in values:
        name, equals, value = given.partition("=")
        if not name or (not equals and name not in os.environ):
            message = f"{given!r} is not NAME=VALUE, and no variable of this name is set in this shell"
            raise click.BadParameter(message, context, parameter)
        out[name] = value if equals else os.environ[name]
    return out


env_option = click.option(
    "--env",
    "env",
    multiple=True,
    callback=_variables,
    metavar="NAME[=VALUE]",
    help="Set a variable of all tasks; without a value, to its value in this shell (repeatable).",
)
"""The option --env, the argument `env`."""
after_option = click.option(
    "--after",
    multiple=True,
    shell_complete=complete_workload,
    metavar="WORKLOAD[:CONDITION]",
    help="Wait until this workload has succeeded, or has `ended`, `failed` or `started` (repeatable).",
)
not_before_option = click.option(
    "--not-before", metavar="TIME", help="Wait until this time, such as 2026-11-28T08:00+01:00, or for a duration: 2h."
)


array_option = click.option(
    "--array",
    metavar="INDEXES[%NUMBER]",
    help="Make it an array with these indexes, such as 0-999%50: at most 50 of 1000 elements at a time.",
)
"""The option --array, the argument `array`."""


def _set_array(body: dict[str, Any], given: str) -> None:
    """Set the indexes and the throttle of a document; a matrix stays."""
    present = body.get("array")
    if not isinstance(present, dict):
        body["array"] = given
        return
    indexes, _, throttle = given.partition("%")
    present["indexes"] = indexes
    if throttle:
        present["throttle"] = int(throttle) if throttle.isdigit() else throttle


def _pairs(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    from mizzen_client import yaml_core

    out = []
    for given in values:
        path, equals, text = given.partition("=")
        if not path or not equals:
            raise click.BadParameter(f"{given!r} is not of the form PATH=VALUE", context, parameter)
        try:
            found = yaml_core.load_all(text) or [None]
        except yaml_core.NotYaml as error:
            raise click.BadParameter(f"{given!r}{error}", context, parameter) from None
        out.append((path, found[0]))
    return tuple(out)


def _set(body: Any, path: str, value: Any) -> None:
    """Set the field at `path`. Missing mappings on the way are made; a number leads into a list that has it."""
    at: Any = body
    walked = "the document"
    *ways, last = path.split(".")

    def key(way: str) -> Any:
        if isinstance(at, list):
            if not way.isdigit() or int(way) >= len(at):
                raise click.UsageError(
                    f"--set {path}: {walked} is a list of {len(at)}; {way!r} must be an index from 0"
                )
            return int(way)
        if not isinstance(at, dict):
            raise click.UsageError(f"--set {path}: {walked} is {at!r}, which has no field {way!r}")
        return way

    for number, way in enumerate(ways, 1):
        found = key(way)
        at = at[found] if isinstance(at, list) else at.setdefault(found, {})
        walked = ".".join(ways[:number])
    at[key(last)] = value


def _merge(body: dict[str, Any], key: str, values: Mapping[str, str]) -> None:
    given = body.get(key) or {}
    if isinstance(given, dict):
        body[key] = {**given, **values}
