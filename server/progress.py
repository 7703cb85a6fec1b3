"""How far a long command is: a bar in a terminal, lines elsewhere; and Ctrl-C, after which it may still finish."""

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
"""Loading compiled code takes a second; whatever takes longer compiles it."""
Shown: TypeAlias = Callable[[float, str], None]
"""Takes the part that is done (0..1), and a few words."""


@contextmanager
def starting() -> Iterator[None]:
    """While nothing is begun that could be left undone, Ctrl-C ends the process at once, with a line.

    An exception would come out of the middle of an import, or of loading compiled code, which may keep it to itself.
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
    """While compiled code is loaded; says so if it has to be compiled first, which takes longer."""
    said = "mizzen: compiling the search, under a minute, once for each version\n"
    word = threading.Timer(_LOADING_S, sys.stderr.write, (said,))
    word.daemon = True
    word.start()
    try:
        yield
    finally:
        word.cancel()


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted and asked for; a second one ends at once."""
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
    """Gives, for a name, what shows how far that is."""
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
