"""`mizzen tetris usage`: records the table usage of jobs that mizzen does not schedule."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from infra.errors import MizzenError
from mizzen.cli.printer import emit_one
from mizzen_client.cli.session import Commands, Session, finish, say
from mizzen_client.errors import ApiError

if TYPE_CHECKING:
    from server.usage_files import UsageRow

_BATCH = 500
_SHOWN = 20
_EXIT_USAGE = 2
_RUN = re.compile(r"runs\[(\d+)\](?:\.(.*))?")


@click.group(cls=Commands)
def usage() -> None:
    """Record the table usage of jobs that mizzen does not schedule."""


@usage.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--bad-rows", type=click.Choice(["refuse", "skip"]), default="refuse", show_default=True)
@click.pass_obj
def import_usage(session: Session, file: Path, bad_rows: str) -> None:
    """Record the runs in a CSV or Parquet FILE (operators). Idempotent: runs that are already recorded are not changed.

    With --bad-rows refuse, nothing is recorded if the file has an unreadable row.
    """
    from server.usage_files import read_usage

    try:
        rows = list(read_usage(file))
    except MizzenError as error:
        say(str(error))
        finish(_EXIT_USAGE)
    wrong = {row.number: row.wrong for row in rows if row.wrong is not None}
    if wrong and bad_rows == "refuse":
        _print_wrong(file, wrong)
        finish(_EXIT_USAGE)
    good: Iterator[UsageRow] = (row for row in rows if row.run is not None)
    done = {"recorded": 0, "known": 0}
    while batch := list(islice(good, _BATCH)):
        answer = _record(session, batch, wrong, skip=bad_rows == "skip")
        if answer is None:
            _print_wrong(file, wrong)
            finish(_EXIT_USAGE)
        done = {key: done[key] + answer[key] for key in done}
    _print_wrong(file, wrong)
    body = {**done, "skipped": len(wrong)}
    emit_one(session, body, lambda: "{recorded} recorded, {known} known before, {skipped} skipped".format(**body),
             name=str(done["recorded"]))  # fmt: skip


def _record(
    session: Session, batch: Sequence["UsageRow"], wrong: dict[int, str], *, skip: bool
) -> dict[str, int] | None:
    """Records a batch of runs through the API, and adds the rows that the API refuses to `wrong`.

    Refused rows are skipped if `skip` is set; otherwise the function returns None.
    """
    left = list(batch)
    while left:
        try:
            answer = session.client.record_usage([row.run for row in left if row.run is not None])
            return {"recorded": answer["recorded"], "known": answer["known"]}
        except ApiError as error:
            bad: dict[int, str] = {}
            for problem in error.errors:
                if found := _RUN.fullmatch(problem.path):
                    bad.setdefault(int(found[1]), f"{found[2] or 'run'}: {problem.value!r}: {problem.message}")
            if not bad:
                raise
            wrong |= {left[index].number: told for index, told in bad.items()}
            if not skip:
                return None
            left = [row for index, row in enumerate(left) if index not in bad]
    return {"recorded": 0, "known": 0}


def _print_wrong(file: Path, wrong: dict[int, str]) -> None:
    for number in sorted(wrong)[:_SHOWN]:
        say(f"{file}: row {number}: {wrong[number]}")
    if len(wrong) > _SHOWN:
        say(f"{file}: and {len(wrong) - _SHOWN} more rows")
