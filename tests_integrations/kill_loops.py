"""Kills trainings repeatedly: `python -m tests_integrations.kill_loops --kills 20 [--training NAME] [--seed N]`.

Each training first runs once without kills; this run also counts its file operations and its iterators. Then it runs in
processes that are killed at one of them. Its kind is drawn uniformly, such as opening a file of a checkpoint (during a
restore), renaming a file (a commit), removing a file (a rotation), or the creation or the end of a loader's iterator.
The run after the last kill must end with the same bytes, and no run may issue a warning about checkpoints.

The folder `exact` has short trainings as people write them (`--training exact`).
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import accelerate  # noqa: F401
import lightning  # noqa: F401  # Imported before the forks.
import transformers  # noqa: F401

from tests_integrations.scripts import TOUCHES, Aim, Ended, run, run_gang, values

FOLDER = Path(__file__).parent / "trainings"
TRAININGS = ("cnn", "gpt", "transformers_trainer", "lightning_swa", "ddp")
ON_GPU = ("gpu",)
"""Trainings that need a GPU."""
EXACT = tuple(sorted(path.stem for path in (Path(__file__).parent / "exact").glob("*_*.py") if path.stem[0] != "_"))
RESULTS = ("result.json", "result.1.json", "model.pt")


@dataclass
class KillOutcome:
    """The results of a training that was killed repeatedly."""

    kills: Counter[str] = field(default_factory=Counter)
    """The number of kills by the kind of the file operation."""
    trainings: int = 0
    """The number of trainings that were started. A training may end before it is killed."""
    differs: list[str] = field(default_factory=list)
    """The differences to the run without kills, and the warnings about checkpoints."""


def _go(name: str, folder: Path, aim: Aim | None, rng: random.Random) -> Ended:
    script = (FOLDER if name in TRAININGS + ON_GPU else FOLDER.parent / "exact") / f"{name}.py"
    told = {"MIZZEN_CHECKPOINT_URI": "ckpt", "MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
    ranks = 2 if name.startswith("ddp") else 1
    if ranks == 1:
        return run(script, folder, aim, **told)
    rank = rng.randrange(ranks)
    ended = run_gang(script, folder, {rank: aim} if aim else None, world_size=ranks, **told)
    shown = next((one for one in ended if one.code == -signal.SIGKILL), max(ended, key=lambda one: one.code))
    return replace(shown, output="".join(one.output for one in ended))


def _warned(ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if "CheckpointWarning" in line]


def results(folder: Path) -> dict[str, bytes]:
    """Returns the content of the result files of a training, as bytes."""
    found = {name: (folder / name).read_bytes() for name in RESULTS if (folder / name).exists()}
    return found | ({"model.pt": values(folder / "model.pt")} if "model.pt" in found else {})


def _differing(ended: Ended, folder: Path, name: str, expected: dict[str, bytes]) -> list[str]:
    """Returns the results of a run that was not killed which differ from the expected ones."""
    if ended.code != 0:
        raise RuntimeError(f"{name} fails after kills: {ended.output}")
    found = results(folder)
    return [key for key in expected if found.get(key) != expected[key]]


def kill_loop(name: str, kills: int, seed: int, folder: Path) -> KillOutcome:
    """Kills a training `kills` times, and compares its results with those of a run without kills.

    Raises:
        RuntimeError: the training fails without being killed.
    """
    rng = random.Random(f"{name} {seed}")
    whole = _go(name, folder / "whole", None, rng)
    if whole.code != 0:
        raise RuntimeError(f"{name} fails without kills: {whole.output}")
    expected = results(folder / "whole")
    touches: dict[str, int] = json.loads((folder / "whole" / TOUCHES).read_text())
    kinds = sorted(touches)
    outcome = KillOutcome(trainings=1, differs=_warned(whole))
    place = folder / "killed"
    while True:
        left = kills - outcome.kills.total()
        aim = None
        if left > 0:
            kind = rng.choice(kinds)
            # The first kill is anywhere in the training. The next ones are log-uniform, because a process that resumes
            # late in a training makes only few operations.
            first = not place.exists()
            aim = Aim(kind, rng.randint(1, touches[kind]) if first else int(touches[kind] ** rng.random()))
        ended = _go(name, place, aim, rng)
        outcome.differs += _warned(ended)
        if ended.code == -signal.SIGKILL and aim is not None:
            outcome.kills[aim.kind] += 1
            continue
        outcome.differs += [f"{key} differs" for key in _differing(ended, place, name, expected)]
        if left <= 0 or outcome.differs:
            # A training that was killed right before its end runs as one does that is complete.
            again = _differing(_go(name, place, None, rng), place, name, expected)
            outcome.differs += [f"{key} differs if it runs again" for key in again]
            return outcome
        shutil.rmtree(place)
        outcome.trainings += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 1 if the results of a training differ from those without kills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="number of kills of each training (default: 20)")
    parser.add_argument(
        "--training", choices=(*TRAININGS, *ON_GPU, "exact", *EXACT), action="append",
        help="run only this training (repeatable); exact: all of that folder; default: the five long ones",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    failed = False
    chosen = given.training or TRAININGS
    for name in [one for group in chosen for one in (EXACT if group == "exact" else (group,))]:
        with tempfile.TemporaryDirectory(prefix="mizzen-kills-") as folder:
            outcome = kill_loop(name, given.kills, given.seed, Path(folder))
        failed |= bool(outcome.differs)
        kills = ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.kills.items()))
        how = "; ".join(outcome.differs) or "as without kills"
        print(f"{name}: {how} ({outcome.trainings} trainings; {kills})", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
