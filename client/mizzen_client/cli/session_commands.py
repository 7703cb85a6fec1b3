"""The commands `exec` and `port-forward`: into a running task."""

from typing import NoReturn

import click

from mizzen.cli.exits import Exit
from mizzen_client.cli.session import WORKLOAD, OutputCommand, Session, finish, interrupted, say

_HIGHEST_PORT = 65535


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

    The command has the same view and rights as the task. It ends with the task, and when the connection is lost.
    Write `--` before a command that has options.
    """
    from mizzen_client.remote_command import SessionClosed, has_terminal, run_command

    id_ = session.resolve(workload)
    opened = session.client.request_session(id_, job=job, task=task)
    try:
        code = run_command(session.client, opened, command, terminal=not no_terminal and has_terminal())
    except SessionClosed as closed:
        _closed(id_, closed)
    finish(code)


def _ports(value: str | tuple[int, int]) -> tuple[int, int]:
    if isinstance(value, tuple):
        return value
    local, colon, port = value.partition(":")
    numbers = [int(text) if text.isdecimal() else -1 for text in (port if colon else local, local)]
    if not (1 <= numbers[0] <= _HIGHEST_PORT and 0 <= numbers[1] <= _HIGHEST_PORT):
        raise click.BadParameter(f"{value!r} must be PORT or LOCAL:PORT, such as 8888 or 9000:8888")
    return numbers[0], numbers[1]


@click.command("port-forward", cls=OutputCommand)
@WORKLOAD
@click.argument("ports", nargs=-1, required=True, type=_ports)
@click.option("--job", help="The job of the task. Default: the first one.")
@click.option("--task", type=click.IntRange(min=0), default=0, show_default=True, help="The index of the task.")
@click.option("--address", default="127.0.0.1", show_default=True, help="The local address to listen on.")
@click.pass_obj
def port_forward(
    session: Session, workload: str, ports: tuple[tuple[int, int], ...], job: str | None, task: int, address: str
) -> None:
    """Forward local ports to ports of a running task until Ctrl-C.

    `8888` forwards the local port 8888 to port 8888 of the task, `9000:8888` the local port 9000, and `0:8888` any free
    one.
    """
    from mizzen_client.port_forward import forward_ports
    from mizzen_client.remote_command import SessionClosed

    id_ = session.resolve(workload)
    opened = session.client.request_session(id_, "forward", job=job, task=task)
    try:
        forward_ports(
            session.client, opened, ports, address=address,
            on_listening=lambda port, local: say(f"{address}:{local} is forwarded to port {port} of {id_}"),
            on_failure=lambda port, why: say(f"a connection to port {port} has failed: {why}"),
        )  # fmt: skip
    except SessionClosed as closed:
        _closed(id_, closed)
    except OSError as error:
        message = (
            f"cannot listen on {address}: {error.strerror or error}; LOCAL:PORT takes another local port, 0 any free"
        )
        raise click.UsageError(message) from None
    except KeyboardInterrupt:
        interrupted("the ports are not forwarded any more")


def _closed(id_: str, why: Exception) -> NoReturn:
    say(f"the session in {id_} was closed: {why}")
    finish(Exit.CLOSED)
