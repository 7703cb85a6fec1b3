"""The files of cells and of their outcomes, named by a hash of the trace and of the code that makes them."""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from research.experiments.cases import BASELINE, MAST, NODES, OURS, THIN, TRACES, ExperimentCase, Sizes
from research.experiments.scenes import build

ROOT = Path(__file__).parents[2]
BOUND = "bound"
GAMING = "gaming-"
"""Begins the names of the outcomes of strategies by which persons try to get ahead."""
_SCENES = ("research/traces", "research/experiments/scenes.py", "research/experiments/fleets.py",
           "research/experiments/cases.py", "examples/philly/fleet.yaml")  # fmt: skip
"""What the files of a cell depend on, in addition to the trace."""
_RUNS = ("simulation", "infra/config/scheduling.py", "domain", "gms", "rms", "research/experiments/replay.py",
         "research/experiments/policies.py")  # fmt: skip
"""What outcomes depend on in addition."""
_RIVALS = ("research/rivals",)


@dataclass(frozen=True)
class OutcomeStore:
    """A folder with cells and outcomes. `data`: the folder with the traces, if there is one."""

    data: Path | None
    out: Path
    sizes: Sizes = THIN

    def scene(self, case: ExperimentCase) -> Path:
        """Returns the folder of a cell's files, which are written if they do not exist."""
        scenes = self.out / f"scenes-{_hash(_SCENES)}-{_trace_hash(case.trace, self.data)}"
        if not (case.folder(scenes) / "case.json").exists():
            build(case, self.data or Path(), scenes, self.sizes)
        return case.folder(scenes)

    def path(self, case: ExperimentCase, name: str) -> Path:
        """Returns the file of the outcome of a policy, or of the bound."""
        sources: tuple[str, ...] = _SCENES
        if name == BOUND:
            sources = (*_SCENES, "research/experiments/bound.py")
        elif name.startswith(GAMING):
            sources = (*_SCENES, *_RUNS, "research/experiments/persons.py", "research/experiments/strategies.py")
        elif name != BASELINE:
            sources = (*_SCENES, *_RUNS, *(_RIVALS if name not in (OURS, MAST, "federated") else ()))
        folder = self.out / "outcomes"
        folder.mkdir(exist_ok=True)
        return folder / f"{case.name}.{name}.{_hash(sources)}-{_trace_hash(case.trace, self.data)}.json"

    def write(self, case: ExperimentCase, name: str, body: object) -> None:
        """Writes an outcome atomically."""
        path = self.path(case, name)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(body))
        new.replace(path)

    def read(self, case: ExperimentCase, name: str) -> Any:
        """Returns an outcome; None: it does not exist yet."""
        path = self.path(case, name)
        return json.loads(path.read_text()) if path.exists() else None


@lru_cache
def _hash(names: tuple[str, ...]) -> str:
    """Returns a hash of source files, and of the Python files in folders."""
    digest = hashlib.sha256()
    for name in names:
        path = ROOT / name
        for source in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(f"{source.relative_to(ROOT)}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:10]


@lru_cache
def _trace_hash(trace: str, data: Path | None) -> str:
    if trace not in TRACES or data is None:
        return "generated"
    files = [TRACES[trace].file, *([NODES] if trace == "openb" else [])]
    return hashlib.sha256(b"".join((data / name).read_bytes() for name in files)).hexdigest()[:10]
