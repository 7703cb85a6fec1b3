"""Tests that training survives SIGKILL at any time: `python -m rigs.crash.kill_loop --kills 500 --store s3`.

Trainings (`rigs.crash.kill_training`) run one after the other. Their processes are killed repeatedly until the training
has finished: after a random time, or between two system calls of a start or of a save (`rigs.crash.ptrace`). The system
call is chosen at random from as many as one start or save was measured to make. The trainings take turns in their
configuration: saves in the foreground, in the background, to two roots (a local and a remote one, where the training
moves between two machines), and gangs of two and three ranks, each of which is killed at its own time. On files and S3,
some processes are frozen during a save instead, until a successor has claimed the root and saved. A frozen process that
continues must be refused, and must not change anything.

After every kill an independent reader (`rigs.crash.kill_watch`) reads the root. A violation is reported unless:

- every record of the log and every checkpoint is complete, and its content is that of an uninterrupted run;
- every checkpoint whose save had returned still exists, or a newer one does;
- the restart resumes from the newest checkpoint, without skipping a checkpoint and without warnings;
- the restart's claim removes all incomplete objects, and at the end only the kept checkpoints remain;
- the final state is identical, byte by byte, to that of an uninterrupted run.

The kills are counted by the stage of the process. With 200 kills or more, a stage without a kill is a failure.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).parents[2]))

import click

from rigs.crash.kill_arena import VARIANTS, Arena, ArenaViolation, Tally, Variant, place_name
from rigs.crash.kill_process import ProcessTimeout
from rigs.crash.kill_runs import KillRun
from rigs.crash.kill_training import WORDS, SaveStage
from rigs.crash.kill_watch import look
from rigs.crash.power_loss import LostWork
from rigs.crash.power_loss import sweeps as power_loss_sweeps

EXIT_VIOLATED, EXIT_INTERRUPTED = 1, 130
ENOUGH = 200
"""Number of kills from which on every stage must have been hit."""
_NEVER = {SaveStage.STARTING, SaveStage.ENDED}
"""Activities that are too short to require a kill."""
MOST_VIOLATIONS = 10


def loop(arena: Arena, kills: int, say: Callable[[str], None], variants: Sequence[Variant] = VARIANTS) -> Tally:
    """Runs trainings until there were `kills` kills and the last one has finished; a violation ends its training."""
    tally = arena.tally
    began_s = time.monotonic()

    def enough() -> bool:
        passed_s = time.monotonic() - began_s
        rate = tally.kills / passed_s
        left = f"{(kills - tally.kills) / rate:.0f} s left" if tally.kills else "measuring"
        say(f"{tally.kills} of {kills} kills, {tally.freezes} freezes, {rate:.2f} kills/s, {left}")
        return tally.kills >= kills

    number = 0
    while not enough():
        run = KillRun(arena, variants[number % len(variants)], arena.rng.randrange(1 << 20), enough)
        number += 1
        try:
            run.finish()
        except (ArenaViolation, ProcessTimeout) as error:
            text = f"{run.variant.name}, seed {run.base.seed}: {error}"
            tally.violations.append(text)
            arena.tell({"violation": text})
            if len(tally.violations) >= MOST_VIOLATIONS:
                break
    return tally


@contextmanager
def _server(store: str) -> Iterator[Callable[[], str]]:
    """Runs a storage server in a separate process; yields a function that creates a bucket and returns its URL.

    The environment variables for the server are set in this process too.
    """
    code = (
        "import json, sys\nfrom bench import buckets\n"
        f"with buckets.{store}() as endpoint:\n"
        "    print(json.dumps(endpoint.environ), flush=True)\n"
        "    for _ in sys.stdin: print(endpoint.bucket(), flush=True)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
        start_new_session=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        asked, answers = server.stdin, server.stdout
        before = dict(os.environ)
        try:
            os.environ.update(json.loads(answers.readline()))

            def bucket() -> str:
                asked.write("\n")
                asked.flush()
                return answers.readline().strip()

            yield bucket
        finally:
            os.environ.clear()
            os.environ.update(before)
            asked.close()
            with suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()


@contextmanager
def arena(store: str, seed: int, tell: Callable[[dict[str, Any]], None], parent: Path | None = None) -> Iterator[Arena]:
    """Yields an arena on `file`, `s3` or `gcs`; removes its files and server afterwards."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kill-loop-", dir=parent)))
        if store == "file":
            numbers = iter(range(1 << 30))

            def new_root() -> str:
                return str(folder / f"root-{next(numbers)}")
        else:
            new_root = stack.enter_context(_server(store))
            # Imports the clouds' libraries once, before the forks.
            look(new_root())
        yield Arena(random.Random(seed), folder, new_root, store != "gcs", tell)


def unhit(tally: Tally) -> list[str]:
    """Returns the stages in which a kill is required but none has happened."""
    hit = {place for place, _ in tally.places}
    return [WORDS[place] for place in SaveStage if place not in hit | _NEVER]


def show(store: str, tally: Tally, passed_s: float, out: IO[str]) -> None:
    """Prints the counts as a table."""
    print(f"{tally.kills} kills ({tally.processes} processes) on {store} in {passed_s:.0f} s:", file=out)
    rows = [(place_name(place, local), count) for (place, local), count in sorted(tally.places.items())]
    for name, count in rows:
        print(f"  {name:44} {count:6}", file=out)
    print(f"methods: {', '.join(f'{how} {count}' for how, count in sorted(tally.hows.items()))}", file=out)
    print(f"{tally.trainings} trainings finished, {tally.restarts} restarts checked", file=out)
    if tally.freezes:
        frozen = ", ".join(f"{place_name(*where)} {count}" for where, count in sorted(tally.frozen.items()))
        print(f"{tally.freezes} frozen and continued, {tally.refused} refused: {frozen}", file=out)
    if store == "gcs":
        print("two writers: not tested, because the emulator does not enforce generation conditions", file=out)
    for text in tally.violations:
        print(f"VIOLATION  {text}", file=out)
    if not tally.violations:
        print("no violation", file=out)


def _lose_power(states: int, seed: int, say: Callable[[str], None], tell: Callable[[dict[str, Any]], None]) -> int:
    """Checks states of the disk after a power loss (`rigs.crash.power_loss`); returns the exit code."""
    began_s = time.monotonic()
    try:
        checked = power_loss_sweeps(states, seed, say)
    except LostWork as error:
        tell({"violation": str(error)})
        return EXIT_VIOLATED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    tell(
        {"power_loss_states": checked, "seed": seed, "passed_s": round(time.monotonic() - began_s, 1), "violations": 0}
    )
    return 0


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--store", type=click.Choice(["file", "s3", "gcs"]), default="file", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--power-loss",
    type=click.IntRange(min=1),
    metavar="STATES",
    help="Instead of killing, check so many states of the disk after a power loss.",
)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Folder for files.")
def main(kills: int, store: str, seed: int, power_loss: int | None, folder: Path | None) -> None:
    """Kill trainings and check their checkpoints. Exit code 1: violation, or a stage not hit; 130: interrupted."""
    terminal = sys.stderr.isatty()
    last_s = 0.0

    def say(text: str) -> None:
        nonlocal last_s
        if terminal or time.monotonic() - last_s > 10:
            last_s = time.monotonic()
            print(f"\r\x1b[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps({"store": store, **line}), flush=True)

    if power_loss is not None:
        sys.exit(_lose_power(power_loss, seed, say, tell))
    began_s = time.monotonic()
    interrupted = False
    with arena(store, seed, tell, folder) as where:
        try:
            loop(where, kills, say)
        except KeyboardInterrupt:
            interrupted = True
    tally = where.tally
    passed_s = time.monotonic() - began_s
    missed = unhit(tally) if tally.kills >= ENOUGH else []
    tell(
        {
            "kills": tally.kills,
            "seed": seed,
            "passed_s": round(passed_s, 1),
            "trainings": tally.trainings,
            "restarts": tally.restarts,
            "frozen": tally.freezes,
            "refused": tally.refused,
            "violations": len(tally.violations),
            "unhit": missed,
            "empty_folders": tally.most_empty_folders,
        }
    )
    if terminal:
        print("\r\x1b[K", end="", file=sys.stderr)
    show(store, tally, passed_s, sys.stderr)
    for name in missed:
        print(f"NEVER HIT  {name}", file=sys.stderr)
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_VIOLATED if tally.violations or missed else 0)


if __name__ == "__main__":
    main()
