"""tiers: recovery from memory, against recovery from a bucket behind 1 Gbit/s; and what frequent checkpoints cost.

Machines are network namespaces on one bridge; the one with the bucket (a server with S3's protocol) sends at most 1
Gbit/s. The first machine saves a state of 1 GB to its memory, to that of its peer and to the bucket. Each restore runs
in a new process, verifies all checksums, and must have read all parts from the place that it is about. The values are
the time of `restore()` alone, divided by that from the bucket:

- `from the machine`: the training was killed and starts again on its machine.
- `from the peer`: the machine is gone from the network, and a third one starts the training.
- `from the peer behind the link`: the same, if the peer, too, sends at most 1 Gbit/s.
- `bucket, of the link`: the time from the bucket, divided by that of the bytes at 1 Gbit/s: shows that the link and not
  the server is the limit.

`training` is the time of a training on one thread without checkpoints, divided by the time with a checkpoint each 10
steps (state of 100 MB, steps of 100 ms, background saves to memory, and to a folder at the interval of this tier); the
three ways take turns in one process. `training, root alone` is the same without tiers: each save goes to the folder.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite
from bench.network_lab import LabNode, ip, lab, nodes

STATE_BYTES = 1_000_000_000
_LINK_BYTES_S = 125e6
_LINK = "1gbit"
_TRAINING = {"size_bytes": 100_000_000, "steps": 50, "step_s": 0.1}

LINES = (
    Line("from the machine", 0.1),
    Line("from the peer", 0.1),
    Line("from the peer behind the link", None),
    Line("bucket, of the link", None),
    Line("training", 0.965, at_least=True),
    Line("training, root alone", None),
)
_OF = {
    "from the machine": ("machine_s", "bucket_s"),
    "from the peer": ("peer_s", "bucket_s"),
    "from the peer behind the link": ("peer_behind_link_s", "bucket_s"),
    "bucket, of the link": ("bucket_s", "link_s"),
    "training": ("none_s", "tiers_s"),
    "training, root alone": ("none_s", "root_s"),
}


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields the figures of all lines."""
    rounds = _recoveries(bench)
    yield from _figures(LINES[:4], rounds, {"state_bytes": STATE_BYTES, "link_bytes_s": _LINK_BYTES_S})
    yield from _figures(LINES[4:], _trainings(bench), _TRAINING)


def _figures(lines: tuple[Line, ...], rounds: list[dict[str, float]], sizes: dict[str, float]) -> Iterator[Figure]:
    for line in lines:
        above, below = _OF[line.name]
        absolute = {name: median(found[name] for found in rounds) for name in (above, below)}
        yield Figure(
            SUITE.name, line, median(found[above] / found[below] for found in rounds), absolute, len(rounds), sizes
        )


def _recoveries(bench: Bench) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="mizzen-bench-") as folder, _network() as (store, first, peer, third):
        bucket = store("serve_bucket", address=store.address)
        store("limit", rate=_LINK)
        about = {"root": bucket["root"], "size_bytes": STATE_BYTES}

        def environ(node: LabNode) -> dict[str, str]:
            home = Path(folder, node.port)
            home.mkdir(exist_ok=True)
            return {**bucket["environ"], "MIZZEN_MEMORY_DIR": str(home), "MIZZEN_PLATFORM": "sigterm"}

        def on(node: LabNode, do: str, tiers: bool, **options: Any) -> Any:
            given = {"peers": True, "address": node.address, "memory_bytes": 3 * STATE_BYTES, "idle_s": 180}
            given_or_none = given if tiers else None
            return node("train", environ=environ(node), do=do, tiers=given_or_none, **about, **options)

        peer("hold", environ=environ(peer), root=bucket["root"], address=peer.address, memory_bytes=3 * STATE_BYTES)
        bench.say("saving")
        on(first, "save", True)
        for number in range(bench.rounds):
            bench.say(f"restoring: round {number + 1} of {bench.rounds}")
            took = {"link_s": STATE_BYTES / _LINK_BYTES_S}
            took["bucket_s"] = on(third, "restore", False, source="s3:")["restore_s"]
            took["machine_s"] = on(first, "restore", True, source="memory+")["restore_s"]
            ip("link", "set", first.port, "down")
            took["peer_s"] = on(third, "restore", True, source="memory+")["restore_s"]
            peer("limit", rate=_LINK)
            took["peer_behind_link_s"] = on(third, "restore", True, source="memory+")["restore_s"]
            peer("unlimit")
            ip("link", "set", first.port, "up")
            found.append(took)
    return found


def _trainings(bench: Bench) -> list[dict[str, float]]:
    bench.say("training")
    # Below the current folder, because a folder for temporary files may be in memory.
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        environ = {**os.environ, "MIZZEN_MEMORY_DIR": folder, "MIZZEN_PLATFORM": "sigterm"}
        environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        asked = json.dumps({"do": "train", "root": f"{folder}/root", "rounds": bench.rounds, **_TRAINING})
        command = [sys.executable, "-W", "ignore", "-m", "bench.tiers_process", asked]
        ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            raise InvalidBenchmark(f"the training ended with {ended.returncode}")
        return list(json.loads(ended.stdout))


@contextmanager
def _network() -> Iterator[list[LabNode]]:
    with lab():
        ip("link", "add", "lan", "type", "bridge")
        ip("link", "set", "lan", "up")
        with nodes(4, "bench.tiers_node") as made:
            for node in made:
                ip("link", "set", node.port, "master", "lan", "gso_max_segs", "65535")
                node("offload")
            yield made


SUITE = Suite("tiers", LINES, run)
