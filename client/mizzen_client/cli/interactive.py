"""`mizzen run --interactive`: a workload that lasts as long as its terminal.

Its task only waits, and the command is a session in it. So a lost connection ends the command, and not the workload.
The task ends when it finds the command's status in `_EXIT_FILE`, or when no session was open for a while.
"""

import time
from typing import Any, NoReturn

from mizzen.cli.exits import Exit
from mizzen_client.cli import formats
from mizzen_client.cli.session import Session, finish, say
from mizzen_client.cli.submit import say_end
from mizzen_client.views import TERMINAL_PHASES, Workload

LINGER_S = 600.0
"""How long the workload waits for a terminal by default, in seconds."""
_EXIT_FILE = ".mizzen-exit"
_POLL_S = 0.5
_WAITS = """began=$(date +%s)
while sleep 2; do
  if [ -s {exit_file} ]; then exit "$(cat {exit_file})"; fi
  last=$began
  if [ -e "$MIZZEN_SESSION_FILE" ]; then last=$(date -r "$MIZZEN_SESSION_FILE" +%s); fi
  if [ $(($(date +%s) - last)) -ge {linger_s} ]; then
    echo "no terminal was connected for {linger_s} s: the workload ends"
    exit 0
  fi
done
"""


def waiting_task(linger_s: float) -> str:
    """Return the script of a task that waits for sessions, and ends when none was open for `linger_s` seconds."""
    return _WAITS.format(exit_file=_EXIT_FILE, linger_s=max(1, round(linger_s)))


def attach(session: Session, workload: Workload, command: tuple[str, ...], linger_s: float) -> NoReturn:
    """Wait until the workload runs, run the command in it on this terminal, and end with its status."""
    from mizzen_client.remote_command import SessionClosed, has_terminal, run_command

    client, id_ = session.client, workload["id"]
    try:
        _until_running(session, id_)
    except KeyboardInterrupt:
        client.cancel(id_)
        say(f"{id_} is being cancelled")
        finish(Exit.INTERRUPTED)
    try:
        code = run_command(client, client.request_session(id_), command, terminal=has_terminal())
    except SessionClosed as closed:
        again = f"`mizzen exec {id_} -- {command[0]}` starts a new one within {formats.duration(linger_s)}"
        say(f"the session in {id_} was closed: {closed}; if the workload still runs, {again}")
        finish(Exit.CLOSED)
    note = ["sh", "-c", f"echo {code} > {_EXIT_FILE}"]
    run_command(client, client.request_session(id_), note, terminal=False, reads_stdin=False)
    finish(code)


def _until_running(session: Session, id_: str) -> None:
    shown = ""
    while True:
        now: Any = session.client.workload(id_)
        if now["phase"] == "running":
            return
        if now["phase"] in TERMINAL_PHASES:
            say_end(session, now)
            finish(Exit.WORKLOAD_FAILED)
        why = session.client.why(id_)["summary"]
        if why != shown:
            say(f"{id_} is {why}")
            shown = why
        time.sleep(_POLL_S)
