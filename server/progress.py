"""Shows the progress of long commands, as a bar in a terminal and as lines elsewhere, and handles Ctrl-C."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

EXIT_INTERRUPTED = 130
_LINE_EVERY_S = 5.0
_LOADING_S = 5.0
"""Seconds after which the code is assumed to be compiled: loading compiled code takes about one second."""
Shown: TypeAlias = Callable[[float, str], None]
"""Shows progress: receives the completed fraction (0..1) and a short text."""


@contextmanager
def starting() -> Iterator[None]:
    """Context manager in which Ctrl-C ends the process immediately, with a message. The block must not write files.

    A `KeyboardInterrupt` could be raised inside an import or while compiled code is loaded, where it can get lost.
    """

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        sys.stderr.write("\nmizzen: interrupted: nothing is written\n")
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def compiling() -> Iterator[None]:
    """Context manager for loading compiled code. Prints a message if the code must be compiled first."""
    said = "mizzen: compiling the search; this takes less than a minute, once per version\n"
    word = threading.Timer(_LOADING_S, sys.stderr.write, (said,))
    word.daemon = True
    word.start()
    try:
        yield
    finally:
        word.cancel()


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Context manager that returns a function: it tells whether Ctrl-C was pressed. A second one ends the process."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def shown(err: Console) -> Iterator[Callable[[str], Shown]]:
    """Context manager that returns a function which creates a progress display (`Shown`) for a name."""
    if err.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[far]}"), TimeElapsedColumn())
        with Progress(*columns, console=err) as bars:

            def bar(name: str) -> Shown:
                task = bars.add_task(name, total=1, far="")
                return lambda part, far: bars.update(task, completed=part, far=far)

            yield bar
        return

    def lines(name: str) -> Shown:
        next_s = time.monotonic() + _LINE_EVERY_S

        def line(_: float, far: str) -> None:
            nonlocal next_s
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + _LINE_EVERY_S
                err.print(f"{name}: {far}", highlight=False, soft_wrap=True)

        return line

    yield lines
