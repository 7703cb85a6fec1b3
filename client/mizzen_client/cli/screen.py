"""A screen that a command redraws in the terminal's second buffer: the earlier content reappears at the end."""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from mizzen.cli.printer import measure
from mizzen_client.cli.numbers import Number
from mizzen_client.cli.session import Session
from mizzen_client.errors import Unavailable, Unreachable

_OPEN, _CLOSE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""Control sequences: switch to the second buffer without cursor and line wrapping, and back."""
watch_option = click.option("-w", "--watch", is_flag=True, help="In a terminal, repeat the list until Ctrl-C.")
interval_option = click.option(
    "--interval", "interval_s", type=Number(0.5, 3600), default=2.0, show_default=True, metavar="SECONDS",
    help="The pause between two requests while watching.",
)  # fmt: skip


def is_live(session: Session) -> bool:
    """Return whether a screen can be drawn: stdout is a terminal, and the output is for people."""
    return sys.stdout.isatty() and session.output in ("table", "wide")


def watch_screen(
    session: Session, read: Callable[[], Any], lines: Callable[[Any, int], list[str]], interval_s: float
) -> None:
    """Draw `lines(read(), width)` every `interval_s` seconds and when the terminal changes its size, until Ctrl-C.

    While the API does not answer, the last screen stays, with a line that says so.
    """
    session.patience_s = 0.0  # The loop itself tries again.
    known, error = None, ""
    with _screen() as changed:
        while True:
            try:
                known, error = read(), ""
            except (Unavailable, Unreachable) as failure:
                error = str(failure)
            due_s = time.monotonic() + interval_s
            while True:
                shown = [] if known is None else lines(known, shutil.get_terminal_size().columns)
                _draw(shown, f"{time.strftime('%H:%M:%S')}  {error or 'Ctrl-C ends'}")
                if not changed(max(0.0, due_s - time.monotonic())):
                    break


def fitted(lines: list[str], height: int) -> list[str]:
    """Return at most `height` lines. The last one says how many are missing."""
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], f"... and {len(lines) - height + 1} more lines"] if height > 0 else []


def _draw(lines: list[str], status: str) -> None:
    columns, height = shutil.get_terminal_size()
    while measure(status) > columns:
        status = status[:-1]
    shown = [*fitted(lines, height - 1), status]
    sys.stdout.write("\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in shown) + "\x1b[J")
    sys.stdout.flush()


@contextmanager
def _screen() -> Iterator[Callable[[float], bool]]:
    """Open the screen; yield a function that waits for seconds, and returns earlier, with True, at a change of size.

    Ctrl-C ends the block without an error. The terminal is restored at its end, and while the command is stopped.
    """

    def stop(_number: int, _: FrameType | None) -> None:
        sys.stdout.write(_CLOSE)
        sys.stdout.flush()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # It continues here after SIGCONT.
        signal.signal(signal.SIGTSTP, stop)
        sys.stdout.write(_OPEN)
        sys.stdout.flush()

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    read, write = os.pipe()
    os.set_blocking(write, False)
    handlers = {
        signal.SIGWINCH: lambda number, frame: None, signal.SIGTSTP: stop, signal.SIGTERM: end, signal.SIGHUP: end,
    }  # fmt: skip
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    woken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def changed(seconds: float) -> bool:
        ready, _, _ = select.select([read], [], [], seconds)
        return bool(ready and os.read(read, 4096))

    try:
        sys.stdout.write(_OPEN)
        yield changed
    except KeyboardInterrupt:
        pass
    finally:
        try:
            sys.stdout.write(_CLOSE)
            sys.stdout.flush()
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(read)
            os.close(write)
