"""How far a long command is: a bar in a terminal, lines elsewhere; and Ctrl-C, after which it may still finish."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

EXIT_INTERRUPTED = 130
_LINE_EVERY_S = 5.0
Shown: TypeAlias = Callable[[float, str], None]
"""Takes the part that is done (0..1), and a few words."""


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
