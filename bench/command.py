"""The command line: runs the selected suites, with JSON lines on stdout, and progress and the table on stderr."""

import contextlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.table import Table

from bench.harness import ROUNDS, Bench, Figure, InvalidBenchmark, Suite, missing

EXIT_SHORT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
SUITES = {
    "gms-scan": "gms_scan",
    "gms-reference": "gms_reference",
    "gms-tick": "gms_tick",
    "rms-bid": "rms_bid",
    "rms-preempt": "rms_preempt",
    "rms-grow": "rms_grow",
    "award": "award",
    "simulate": "simulate",
    "cadence": "cadence",
    "reclaim": "reclaim",
    "ras": "ras",
    "tetris-gap": "tetris_gap",
    "tetris-infeasible": "tetris_infeasible",
    "tetris-shape": "tetris_shape",
    "tetris-colocation": "tetris_colocation",
    "tetris-joint": "tetris_joint",
    "tetris-annealing": "tetris_annealing",
    "tetris-moves": "tetris_moves",
    "tetris-memory": "tetris_memory",
    "checkpoint": "checkpoint",
    "gpu-saves": "gpu_saves",
    "tiers": "tiers",
    "copies": "copies",
    "end-to-end": "end_to_end",
    "short-elements": "short_elements",
    "backlog": "backlog",
    "waiting-elements": "waiting_elements",
    "machines": "machines",
    "balance": "balance",
    "reclaim-now": "reclaim_now",
    "killswitch": "killswitch",
    "shaping": "shaping",
    "task-start": "task_start",
    "memory": "memory",
    "console": "console",
}
"""Module of each suite, in the order of execution."""
_ASKED = {"gpu-saves"}
"""Suites that run only if they are asked for, because few machines have what they need."""
_PLAIN_WIDTH = 160
_AGAIN_S = 10.0


def chosen(asked: str | None, names: Sequence[str]) -> list[str]:
    """Returns the suites that `asked` (comma-separated names or prefixes of names) selects; None: all but `_ASKED`.

    Raises:
        click.UsageError: a part selects no suite.
    """
    if asked is None:
        return [name for name in names if name not in _ASKED]
    picked: set[str] = set()
    for part in (p.strip() for p in asked.split(",")):
        found = {part} if part in names else {name for name in names if part and name.startswith(part)}
        if not found:
            raise click.UsageError(f"suite {part!r}: must be a name or prefix of {', '.join(names)}")
        picked |= found
    return [name for name in names if name in picked]


def load(names: Sequence[str], modules: Mapping[str, str] = SUITES) -> list[Suite]:
    """Imports the suites with these names: each is the `SUITE` of its module."""
    return [import_module(f"bench.{modules[name]}").SUITE for name in names]


class Progress:
    """Shows progress: one line that is overwritten on a terminal, else separate lines.

    It uses no thread, which would disturb the measurements.
    """

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._clock = clock
        self._said = "", -math.inf
        self.suite = ""

    def __call__(self, text: str) -> None:
        """Reports the state of the suite. Without a terminal, lines `phase: …` of one phase are rate limited."""
        line = f"{self.suite}: {text}"
        phase, now = line.rpartition(":")[0], self._clock()
        if not self._terminal:
            if phase == self._said[0] and ":" in text and now < self._said[1] + _AGAIN_S:
                return
            self._said = phase, now
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Clears the line on a terminal."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def run(suites: Sequence[Suite], rounds: int, outputs: Sequence[IO[str]]) -> int:
    """Runs suites one after the other, writes each figure to all `outputs`, and shows the table.

    Returns:
        The exit code.
    """
    progress = Progress(sys.stderr)
    figures: list[Figure] = []
    interrupted = False
    for suite in suites:
        progress.suite = suite.name
        try:
            for figure in suite.run(Bench(rounds, progress)):
                figures.append(figure)
                progress.clear()
                for output in outputs:
                    print(figure.to_json(), file=output, flush=True)
        except KeyboardInterrupt:
            interrupted = True
            break
        except InvalidBenchmark as error:
            progress.clear()
            print(f"{suite.name}: {error}", file=sys.stderr)
        except Exception:
            progress.clear()
            print(f"{suite.name}: failed", file=sys.stderr)
            traceback.print_exc()
    progress.clear()
    absent = list(missing(suites, figures))
    show(figures, absent, Console(stderr=True, highlight=False))
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_SHORT if absent or any(figure.holds is False for figure in figures) else 0


def show(figures: Sequence[Figure], absent: Sequence[str], console: Console) -> None:
    """Prints the table of figures, and the lines that have no figure."""
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    table = Table(box=None, pad_edge=False)
    for name in ("suite", "line", "ratio", "bar", "", "medians"):
        table.add_column(name, justify="right" if name == "ratio" else "left", overflow="fold")
    for f in figures:
        bar = "" if f.line.bar is None else f"{'≥' if f.line.at_least else '≤'} {f.line.bar:g}"
        word, style = {True: ("holds", "green"), False: ("FALLS SHORT", "bold red"), None: ("", "dim")}[f.holds]
        amounts = ", ".join(f"{name} {value:.4g}" for name, value in f.absolute.items())
        table.add_row(f.suite, f.line.name, f"{f.ratio:.3g}", bar, word, amounts, style=style)
    console.print(table)
    for line in absent:
        console.print(f"missing  {line}", style="bold red", markup=False)


@contextlib.contextmanager
def _outputs(path: Path | None) -> Iterator[list[IO[str]]]:
    if path is None:
        yield [sys.stdout]
        return
    with path.open("w") as file:
        yield [sys.stdout, file]


@click.command()
@click.option("--suite", metavar="NAMES", help="Comma-separated names or prefixes, such as `rms`.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=ROUNDS,
    show_default=True,
    help="Number of rounds after the warm-up.",
)
@click.option(
    "--json",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the JSON lines to this file.",
)
def bench(suite: str | None, rounds: int, path: Path | None) -> None:
    """Run benchmarks and compare them with their bars.

    Exit code 1: a line misses its bar or has no figure; 130: interrupted.
    """
    names = chosen(suite, list(SUITES))
    with _outputs(path) as outputs:
        sys.exit(run(load(names), rounds, outputs))
