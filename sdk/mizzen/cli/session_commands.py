"""The commands `exec` and `port-forward`: into a running task."""

import click

from mizzen.cli.exits import Exit
from mizzen.cli.session import WORKLOAD, OutputCommand, Session, finish, say


@click.command("exec", cls=OutputCommand)
@WORKLOAD
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--job", help="The job of the task. Default: the first one.")
@click.option("--task", type=click.IntRange(min=0), default=0, show_default=True, help="The index of the task.")
@click.option("-T", "--no-terminal", is_flag=True, help="Use pipes, also if stdin and stdout are a terminal.")
@click.pass_obj
def exec_(
    session: Session, workload: str, command: tuple[str, ...], job: str | None, task: int, no_terminal: bool
) -> None:
    """Run a command in a running task, and exit with its status.

    The command sees and may do what the task sees and may do. It ends with the task, and when the connection is lost.
    Write `--` before a command that has options.
    """
    from mizzen.client.remote_command import SessionClosed, has_terminal, run_command

    id_ = session.resolve(workload)
    opened = session.client.request_session(id_, job=job, task=task)
    try:
        code = run_command(session.client, opened, command, terminal=not no_terminal and has_terminal())
    except SessionClosed as closed:
        say(f"the session in {id_} was closed: {closed}")
        finish(Exit.CLOSED)
    finish(code)
