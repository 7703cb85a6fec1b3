"""Gangs that save and load distributed checkpoints: `python -m tests_integrations.dcp_gangs [--most 8]`.

Each number of ranks from 2 to `--most` saves, and each of them loads what each has saved. Then each rank of a gang of
two and of three is killed before each of the file operations of its saves. The next gang must load a checkpoint all of
whose values are of one step.
"""

import argparse
import itertools
import signal
import sys
import tempfile
from pathlib import Path

from mizzen.checkpoint import list_committed
from tests_integrations.scripts import TOUCHES, Aim, Ended, run_gang

SCRIPT = Path(__file__).with_name("dcp_ranks.py")
KINDS = ("open root", "os.mkdir root", "os.link root", "os.rename root", "os.remove root", "os.rmdir root")
"""The kinds of the file operations of a save; see `Aim`."""


def gang(doing: str, folder: Path, ranks: int, aims: dict[int, Aim] | None = None) -> list[Ended]:
    """Runs all ranks of a gang to their end. Without `aims`, all must succeed."""
    told = {"DCP": doing, "DCP_ROOT": "root", "OMP_NUM_THREADS": "1"}
    ended = run_gang(SCRIPT, folder, aims, world_size=ranks, **told)
    assert aims or all(one.code == 0 for one in ended), "".join(one.output for one in ended)
    return ended


def killed_saves(folder: Path, ranks: int, rank: int, every: int = 1) -> int:
    """Kills a rank before each file operation of its saves, or each one in `every`, and loads what was committed.

    Returns the number of kills.
    """
    kills = 0
    for kind in KINDS:
        for number in itertools.count(1, every):
            place = folder / f"{ranks}-{rank}-{kind.replace(' ', '-')}-{number}"
            ended = gang("save", place, ranks, {rank: Aim(kind, number)})
            if ended[rank].code != -signal.SIGKILL:
                assert (place / TOUCHES).exists(), "".join(one.output for one in ended)
                break
            kills += 1
            if list_committed(place / "root", verify=True):
                gang("load", place, ranks % 3 + 1)
            gang("save", place, ranks)
            assert list_committed(place / "root", verify=True)[0].step == 3
    return kills


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=8, help="the greatest number of ranks (default: 8)")
    sizes = range(2, parser.parse_args().most + 1)
    with tempfile.TemporaryDirectory(prefix="mizzen-dcp-") as name:
        folder = Path(name)
        for saving in sizes:
            gang("save", folder / str(saving), saving)
            for loading in sizes:
                gang("load", folder / str(saving), loading)
            print(f"saved by {saving} ranks: exact in loads by {', '.join(map(str, sizes))}", flush=True)
        for ranks in (2, 3):
            kills = [killed_saves(folder / "killed", ranks, rank) for rank in range(ranks)]
            print(f"{ranks} ranks: {kills} kills of the saves of each rank, no mixed checkpoint", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
