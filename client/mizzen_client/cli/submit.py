"""Commands that submit workloads and wait for them."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mizzen.cli.printer import dump, emit_list
from mizzen_client.cli import formats
from mizzen_client.cli.exits import Exit, exit_of
from mizzen_client.cli.log_commands import print_logs
from mizzen_client.cli.numbers import Number
from mizzen_client.cli.overrides import Overrides, override_options
from mizzen_client.cli.pages import left_lines
from mizzen_client.cli.session import (
    WORKLOADS,
    OutputCommand,
    Session,
    complain,
    complete_workload,
    finish,
    interrupted,
    say,
)
from mizzen_client.cli.workload_commands import WORKLOAD_COLUMNS
from mizzen_client.errors import ApiError, ClientError, Unavailable, Unreachable
from mizzen_client.views import Workload

_IS = {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}

if TYPE_CHECKING:
    from mizzen_client.documents import Document


@click.command(cls=OutputCommand, default_output="name")
@click.argument("files", nargs=-1, type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--from",
    "origin",
    metavar="WORKLOAD",
    shell_complete=complete_workload,
    help="Submit the document of this workload again, instead of FILES.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print where the workload would start and which workloads it would evict, or why it would wait.",
)
@override_options
@click.option("-f", "--follow", is_flag=True, help="Print the logs until the workload has ended.")
@click.option("--wait", "wait_", is_flag=True, help="Wait until all workloads have ended.")
@click.option(
    "--idempotency-key", metavar="KEY", help="A second submission with the same key returns the same workload."
)
@click.option(
    "--wait-for-room",
    type=Number(min=0),
    metavar="SECONDS",
    help="How long to retry while the tenant's queue is full (default: 86400, one day; 0: fail at once).",
)
@click.pass_obj
def submit(
    session: Session,
    files: tuple[str, ...],
    *,
    origin: str | None,
    dry_run: bool,
    tenant: str | None,
    name: str | None,
    labels_: dict[str, str],
    env: dict[str, str],
    tasks: int | dict[str, int] | None,
    array: str | None,
    after: tuple[str, ...],
    not_before: str | None,
    settings: tuple[tuple[str, Any], ...],
    follow: bool,
    wait_: bool,
    idempotency_key: str | None,
    wait_for_room: float | None,
) -> None:
    """Submit workload documents.

    FILES are YAML or JSON; `-` is stdin. The ids of the workloads are printed. A `workdir` in a document is a folder,
    relative to the document's file. It is packed and uploaded without what .gitignore and .mizzenignore list. If there
    are several documents, none is submitted unless all are valid.
    """
    session.room_patience_s = wait_for_room
    if bool(files) == (origin is not None):
        raise click.UsageError("give either FILES or --from WORKLOAD")
    documents = read_files(files) if origin is None else [document_of(session, origin)]
    if len(documents) > 1 and (name or follow):
        raise click.UsageError("--name and --follow can be used with only one document")
    overrides = Overrides(tenant, name, labels_, env, tasks, array, after, not_before, settings)
    documents = [_changed(document, overrides) for document in documents]
    bodies = [document.body for document in documents]
    if dry_run:
        _emit_plans(session, documents, bodies)
    if len(documents) > 1:
        _check(session, documents, bodies)
    workloads: list[Workload] = []
    for number, (document, body) in enumerate(zip(documents, bodies, strict=True)):
        key = f"{idempotency_key}-{number}" if idempotency_key and number else idempotency_key
        try:
            made = session.client.submit(body, document.workdir, idempotency_key=key)
            workloads.append(made)
            for note in made.get("document_notes", ()):
                say(f"{document.source}: {note}")
            if made.get("never"):
                say(f"{made['id']} can never start in the current fleet: {made['never']}")
        except ClientError as error:
            complain_of(document, error)
            if workloads:
                emit_list(session, workloads, WORKLOAD_COLUMNS)
            finish(exit_of(error))
        except KeyboardInterrupt:
            if workloads:
                emit_list(session, workloads, WORKLOAD_COLUMNS)
            interrupted(
                f"{len(workloads)} of {formats.plural(len(documents), 'document')} submitted, up to {document.source}"
            )
    if follow:
        _follow(session, workloads[0])
    elif wait_:
        for workload in workloads:
            say(f"submitted {workload['name']} as {workload['id']}")
        _wait(session, [workload["id"] for workload in workloads])
    else:
        emit_list(session, workloads, WORKLOAD_COLUMNS)
        if len(workloads) == 1 and sys.stderr.isatty():
            id_ = workloads[0]["id"]
            say(f"`mizzen logs -f {id_}` follows its logs, `mizzen why {id_}` explains why it waits")


def _changed(document: "Document", overrides: Overrides) -> "Document":
    """Return a document with the changes of the options. A `workdir` of `--set` is relative to the current folder."""
    from mizzen_client.documents import with_workdir

    body = overrides.applied(document.body)
    if "workdir" not in body:
        return replace(document, body=body)
    return replace(with_workdir(replace(document, body=body, workdir=None, folder=Path())), folder=document.folder)


@click.command(cls=OutputCommand, default_output="name")
@WORKLOADS
@click.option("--failed", is_flag=True, help="Of an array, submit only the elements that failed.")
@click.pass_obj
def retry(session: Session, workloads: tuple[str, ...], failed: bool) -> None:
    """Submit the documents of workloads again. The ids of the new workloads are printed.

    NAME/INDEX is an element of an array: the new array has only this index.
    """

    def again(reference: str) -> Workload:
        document = document_of(session, reference)
        if failed:
            _keep_failed(session, reference, document.body)
        return session.client.submit(document.body)

    done, code = session.each_name(workloads, again)
    if done:
        emit_list(session, done, WORKLOAD_COLUMNS)
    finish(code)


def _keep_failed(session: Session, reference: str, body: dict[str, Any]) -> None:
    """Leave only the indexes of failed elements in the document of an array."""
    array = session.resolve(reference)
    if not isinstance(body.get("array"), dict):
        raise ClientError("--failed is possible only for an array")
    found = session.client.workloads(array=array, phases=("failed",))
    indexes = sorted(w["element"]["index"] for w in found if w["element"])
    if not indexes:
        raise ClientError(f"no element of the array {reference} has failed")
    body["array"]["indexes"] = _ranges(indexes)


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as ranges, such as `3,7-9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@click.command(cls=OutputCommand)
@WORKLOADS
@click.pass_obj
def wait(session: Session, workloads: tuple[str, ...]) -> None:
    """Wait until workloads have ended. The exit code is 0 if all of them succeeded, else 1."""
    _wait(session, [session.resolve(workload) for workload in workloads])


def read_files(files: tuple[str, ...]) -> "list[Document]":
    """Read the documents of all files; `-` is stdin. Print all problems and end the command if there are any."""
    from mizzen_client.documents import not_text, parse_documents, read_documents

    documents = []
    problems = []
    for file in files:
        try:
            if file == "-":
                documents += parse_documents(sys.stdin.read(), "stdin", Path())
            else:
                documents += read_documents(Path(file))
        except ClientError as error:
            problems.append(str(error))
        except UnicodeDecodeError as error:
            problems.append(f"stdin: {not_text(error)}")
    if problems:
        for problem in problems:
            click.echo(formats.visible(problem), err=True)
        finish(Exit.USAGE)
    return documents


def document_of(session: Session, reference: str) -> "Document":
    """Return the document of a workload, with the archive of its working directory."""
    from mizzen_client.documents import Document

    workload = session.client.workload(session.resolve(reference))
    return Document(f"workload {workload['id']}", workload["spec"])


def complain_of(document: "Document", error: ClientError) -> None:
    """Print an error of a request with a document; problems of the document are printed with its source."""
    of_document = isinstance(error, ApiError) and error.errors
    complain(error, f"{document.source}: " if of_document else "")


def _check(session: Session, documents: "list[Document]", bodies: list[dict[str, Any]]) -> None:
    """Print the problems of all documents, and end the command if a document is invalid.

    A document may depend on those before it, which the API does not have yet.
    """
    code = 0
    earlier: list[object] = []
    for document, body in zip(documents, bodies, strict=True):
        try:
            session.client.dry_run(_without(body, earlier), document.workdir, patience_s=0)
        except (Unavailable, Unreachable):
            pass  # It cannot be checked now; the submission checks it again.
        except ClientError as error:
            complain_of(document, error)
            code = code or exit_of(error)
        earlier.append(body.get("name"))
    if code:
        finish(code)


def _without(body: dict[str, Any], names: list[object]) -> dict[str, Any]:
    """Return a document without its dependencies on workloads with these names."""

    def named(one: object) -> object:
        return one.partition(":")[0] if isinstance(one, str) else isinstance(one, dict) and one.get("workload")

    after = body.get("after")
    return body | {"after": [one for one in after if named(one) not in names]} if isinstance(after, list) else body


def _emit_plans(session: Session, documents: "list[Document]", bodies: list[dict[str, Any]]) -> NoReturn:
    plans, code = [], 0
    for document, body in zip(documents, bodies, strict=True):
        try:
            plan = session.client.dry_run(body, document.workdir)
            plans.append({"document": document.source, **plan})
            if plan.get("never"):
                say(f"{document.source}: {plan['never']}")
                code = code or Exit.IMPOSSIBLE
        except ClientError as error:
            complain_of(document, error)
            code = code or exit_of(error)
    if session.output in ("json", "yaml"):
        click.echo(dump(plans, session.output))
    else:
        for shown in plans:
            click.echo(formats.visible(str(shown["region"] or "-") if session.output == "name" else plan_page(shown)))
    finish(code)


def plan_page(plan: Mapping[str, Any]) -> str:
    """Return where a document would start now and which workloads it would evict, or why it would wait."""
    standing = "over its tenant's quota" if plan["over_quota"] else f"level {plan['rank']}"
    if not plan["region"]:
        lines = [f"{plan['document']}: would wait ({standing})"]
    else:
        where = f"{plan['region']} on {', '.join(plan['machines'])}" if plan["machines"] else plan["region"]
        others = plan["other_victims"]
        evicted = [
            ", ".join(plan["victims"]),
            f"{formats.plural(others, 'workload')} of other tenants" if others else "",
        ]
        whom = f", evicting {' and '.join(filter(None, evicted))}" if any(evicted) else ""
        lines = [f"{plan['document']}: would start in {where}{whom} ({standing})"]
    return "\n".join([*lines, *(f"  {formats.reason(reason)}" for reason in plan["reasons"])])


def _follow(session: Session, workload: Workload) -> NoReturn:
    id_ = workload["id"]
    say(f"submitted {workload['name']} as {id_}")
    try:
        print_logs(session, id_, follow=True)
        [done] = session.client.wait([id_])
    except KeyboardInterrupt:
        interrupted(f"{id_} continues; `mizzen logs -f {id_}` follows it again, `mizzen cancel {id_}` stops it")
    say_end(session, done)
    finish(_code([done]))


def say_end(session: Session, done: Any) -> None:
    """Print how a workload has ended, and which files its tasks have left."""
    say(_ending(done))
    for line in left_lines({**done, "attempts": session.client.attempts(done["id"])})[1:]:
        say(line)


def _wait(session: Session, ids: list[str]) -> NoReturn:
    try:
        done = session.client.wait(ids, on_change=lambda workload: say(_ending(workload)))
    except KeyboardInterrupt:
        interrupted(f"the workloads continue; wait again with `mizzen wait {' '.join(ids)}`")
    emit_list(session, done, WORKLOAD_COLUMNS)
    finish(_code(done))


def _ending(workload: Workload) -> str:
    reason = formats.reason(workload["reason"])
    phase = workload["phase"]
    return f"{workload['id']} {workload['name']} {_IS.get(phase, f'is {phase}')}{f' ({reason})' if reason else ''}"


def _code(done: "list[Any]") -> int:
    return Exit.OK if all(workload["phase"] == "succeeded" for workload in done) else Exit.WORKLOAD_FAILED
