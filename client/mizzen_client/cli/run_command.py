"""`mizzen run`: a command in the fleet without a document, with the files of the current folder."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from mizzen.cli.printer import emit_list
from mizzen.cli.values import BadValue, seconds
from mizzen_client.cli.exits import Exit, exit_of
from mizzen_client.cli.interactive import LINGER_S, attach, waiting_task
from mizzen_client.cli.log_commands import print_logs
from mizzen_client.cli.numbers import Number
from mizzen_client.cli.overrides import (
    TASKS_SHOWN,
    after_option,
    array_option,
    env_option,
    not_before_option,
    tasks_of,
)
from mizzen_client.cli.session import OutputCommand, Session, complain, complete_tenant, finish, label_option, say
from mizzen_client.cli.submit import say_end
from mizzen_client.cli.workload_commands import WORKLOAD_COLUMNS
from mizzen_client.documents import without_empty
from mizzen_client.errors import ApiError, ClientError
from mizzen_client.log_lines import FollowedTo
from mizzen_client.views import Workload

_LONGEST_NAME = 40
_FIELD = re.compile(r"(?:jobs\[0\]\.(?:resources\.)?|limits\.)?(\w+)(?:\[\d+\]|\.(.*))?")
_OPTIONS = {"accelerators": "--gpus", "labels": "--label", "secrets": "--secret", "run": "COMMAND"}
_STATUS = re.compile(r"(exit code|signal) (\d+)")


@click.command(
    cls=OutputCommand,
    default_output="name",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--gpus",
    metavar="TYPE:NUMBER",
    multiple=True,
    help="GPUs of each task, such as a100:8; repeat it for acceptable types in order of preference.",
)
@click.option("--cpus", type=Number(min=0, min_open=True), help="Cores of each task (default: 1).")
@click.option("--memory", metavar="SIZE", help="Memory of each task, such as 16GiB (default: 1GiB).")
@click.option(
    "--tasks",
    type=tasks_of,
    metavar=TASKS_SHOWN,
    default=1,
    show_default=True,
    help="Number of tasks, which start together, or the fewest and the most: 2:16.",
)
@array_option
@click.option("--name", help="The workload's name (default: that of the program).")
@click.option("--tenant", shell_complete=complete_tenant, help="The tenant, if the API key has none.")
@click.option("--priority", type=click.IntRange(1, 7), help="A level below the tenant's; 7 is the lowest.")
@click.option("--retries", type=click.IntRange(min=0), help="Retries after failures of the command (default: 0).")
@click.option("--max-runtime", metavar="DURATION", help="Running time after which the workload is stopped, such as 2h.")
@click.option("--isolation", help="The weakest isolation of machines on which it may run.")
@click.option(
    "--capacity", metavar="KIND", multiple=True, help="A capacity kind on which it may run, such as own; repeatable."
)
@after_option
@not_before_option
@label_option("Add a label")
@env_option
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="NAME=SECRET",
    help="Set a variable to one of the tenant's secrets (repeatable).",
)
@click.option(
    "--workdir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="The folder whose files the tasks get (default: this one).",
)
@click.option("--no-files", is_flag=True, help="Upload no files.")
@click.option("-d", "--detach", is_flag=True, help="Print the id and do not wait.")
@click.option("-i", "--interactive", is_flag=True, help="Run the command on this terminal; the workload ends with it.")
@click.option(
    "--linger",
    metavar="DURATION",
    default=f"{LINGER_S:.0f}s",
    show_default=True,
    help="With --interactive: how long the workload waits without a terminal before it ends.",
)
@click.pass_obj
def run(
    session: Session,
    /,
    command: tuple[str, ...],
    *,
    workdir: Path,
    no_files: bool,
    detach: bool,
    interactive: bool,
    linger: str,
    **options: Any,
) -> None:
    """Run a command in the fleet, print its output, and exit with its status.

    The files of the current folder are uploaded, without those that .gitignore and .mizzenignore list. Ctrl-C asks
    whether to detach or to cancel; if stdin is no terminal, it cancels. Write `--` before a command that has options.
    """
    if interactive and (detach or options["tasks"] != 1 or options["array"]):
        raise click.UsageError("--interactive: is for one task that is followed, without --detach, --tasks and --array")
    try:
        linger_s = seconds(linger, above_zero=True)
    except BadValue as error:
        raise click.UsageError(f"--linger: {error}") from None
    options["gpus"] = tuple(_typed(session, one, options["tenant"]) for one in options["gpus"])
    body = _document(command, **options)
    if interactive:
        body["jobs"][0]["run"] = waiting_task(linger_s)
    try:
        workload = session.client.submit(body, None if no_files else workdir)
    except ClientError as error:
        if isinstance(error, ApiError):
            error.errors = tuple(replace(problem, path=_option(problem.path)) for problem in error.errors)
        complain(error)
        finish(exit_of(error))
    if workload.get("never"):
        say(f"{workload['id']} can never start in the current fleet: {workload['never']}")
    if detach:
        emit_list(session, [workload], WORKLOAD_COLUMNS)
        return
    say(f"submitted {workload['name']} as {workload['id']}")
    if interactive:
        attach(session, workload, command, linger_s)
    _until_the_end(session, workload)


def _typed(session: Session, gpus: str, tenant: str | None) -> str:
    """Add the GPU type to a number of GPUs without a type, if the tenant's quota has only one type."""
    if not gpus.isdecimal():
        return gpus
    name = tenant or session.client.whoami()["tenant"]
    types = sorted(session.client.tenant(name)["quota"]["gpus"]) if name else []
    if len(types) != 1:
        known = f"one of {', '.join(types)}" if types else "a type of GPU"
        raise click.UsageError(f"--gpus: {gpus!r} has no type; write TYPE:{gpus} with {known}")
    return f"{types[0]}:{gpus}"


def _document(
    command: tuple[str, ...],
    *,
    gpus: tuple[str, ...],
    cpus: float | None,
    memory: str | None,
    tasks: int | dict[str, int],
    array: str | None,
    name: str | None,
    tenant: str | None,
    priority: int | None,
    retries: int | None,
    max_runtime: str | None,
    isolation: str | None,
    capacity: tuple[str, ...],
    after: tuple[str, ...],
    not_before: str | None,
    labels_: dict[str, str],
    env: dict[str, str],
    secrets: tuple[str, ...],
) -> dict[str, Any]:
    """Return the document of one job that runs the command."""
    resources = without_empty({"accelerators": list(gpus), "cpus": cpus, "memory": memory})
    limits = without_empty({"retries": retries, "max_runtime": max_runtime})
    job = {"name": "main", "tasks": tasks, "run": list(command), "resources": resources, "env": env}
    job["secrets"] = dict(_secret(one) for one in secrets)
    fields: dict[str, Any] = {
        "name": name or _name(command[0]),
        "tenant": tenant,
        "priority": priority,
        "labels": labels_,
    }
    fields |= {"after": list(after), "not_before": not_before, "array": array, "isolation": isolation}
    fields |= {"capacity": list(capacity)}
    return without_empty({"version": 1, **fields, "jobs": [without_empty(job)], "limits": limits})


def _option(path: str) -> str:
    """Return the option that sets a field of the document: `--env 'A B'` for `jobs[0].env.'A B'`."""
    found = _FIELD.fullmatch(path)
    if found is None:
        return path
    option = _OPTIONS.get(found[1], f"--{found[1].replace('_', '-')}")
    return f"{option} {found[2]}" if found[2] else option


def _secret(given: str) -> tuple[str, str]:
    name, equals, secret = given.partition("=")
    if not name or not equals or not secret:
        raise click.UsageError(f"--secret: {given!r} is not of the form NAME=SECRET")
    return name, secret


def _name(program: str) -> str:
    """Return a name for a workload, from the name of its program."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(program).name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return name or "run"


def _until_the_end(session: Session, workload: Workload) -> NoReturn:
    """Follow the workload and end with its status."""
    id_ = workload["id"]
    is_asked = False
    position = FollowedTo()
    while True:
        try:
            print_logs(session, id_, follow=True, position=position)
            [done] = session.client.wait([id_])
            break
        except KeyboardInterrupt:
            if not is_asked and _detaches():
                say(f"{id_} continues; `mizzen logs -f {id_}` follows it again, `mizzen cancel {id_}` stops it")
                finish(Exit.INTERRUPTED)
            if is_asked:
                say(f"{id_} is being cancelled; `mizzen show {id_}` shows when it has ended")
                finish(Exit.INTERRUPTED)
            is_asked = True
            say(f"cancelling {id_}; it ends when its tasks have stopped")
            session.client.cancel(id_)
    say_end(session, done)
    if is_asked:
        finish(Exit.INTERRUPTED)
    finish(_status(done))


class _Answer(click.Choice[str]):
    """A choice whose beginning is enough, such as its first letter."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found = [choice for choice in self.choices if value and choice.startswith(str(value).lower())]
        return super().convert(found[0] if len(found) == 1 else value, param, ctx)


def _detaches() -> bool:
    """Ask whether Ctrl-C should detach; return the answer. Without a terminal, or after a second Ctrl-C, cancel."""
    if not sys.stdin.isatty():
        return False
    try:
        click.echo(err=True)
        choice = click.prompt("Detach or cancel?", type=_Answer(("detach", "cancel")), default="cancel", err=True)
    except (click.Abort, KeyboardInterrupt):
        return False
    return bool(choice == "detach")


def _status(done: Any) -> int:
    """Return the exit status of the task that failed first, as a shell would; 1 if there is none."""
    if done["phase"] == "succeeded":
        return Exit.OK
    detail = (done["reason"] or {}).get("detail", {})
    found = _STATUS.fullmatch(str(detail.get("status", "")))
    if found is None or int(found[2]) == 0:
        return Exit.WORKLOAD_FAILED
    return int(found[2]) if found[1] == "exit code" else 128 + int(found[2])
