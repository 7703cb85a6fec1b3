"""A training of the suite `tiers`, in a process of its own: saves, restores, or trains with and without checkpoints."""

import importlib.util
import json
import mmap
import sys
import time
from typing import Any

import numpy as np

from bench.checkpoint import INTEGRATIONS
from mizzen.checkpoint import Checkpointer, CheckpointSettings, Tiers

_ARRAYS = 48


def _state(size_bytes: int) -> dict[str, Any]:
    generator = np.random.default_rng(1)
    return {f"w{number}": generator.random(size_bytes // 4 // _ARRAYS, np.float32) for number in range(_ARRAYS)}


def _model(size_bytes: int, value: float) -> Any:
    """Returns a torch module with `_ARRAYS` parameters, which have different values."""
    if importlib.util.find_spec("torch") is None:
        sys.path.extend(str(path) for path in INTEGRATIONS.parents[1].glob("lib/*/site-packages"))
    torch = importlib.import_module("torch")
    size = size_bytes // 4 // _ARRAYS
    return torch.nn.ParameterList([torch.full((size,), value + number) for number in range(_ARRAYS)])


def _checkpointer(root: str, tiers: dict[str, Any] | None, background: bool = False) -> Checkpointer:
    given = None if tiers is None else Tiers(**tiers)
    return Checkpointer(root, keep=1, background=background, settings=CheckpointSettings(tiers=given))


def _provide_memory(size_bytes: int) -> None:
    """Touches memory once and frees it: the host of a virtual machine provides a page at its first use.

    In huge pages, as a load uses them (`part_reader.aligned_buffer`).
    """
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, size_bytes, 4096):
            memory[start] = 1


def save(root: str, size_bytes: int, tiers: dict[str, Any] | None) -> None:
    """Saves a model to all tiers."""
    _provide_memory(3 * size_bytes)
    checkpointer = _checkpointer(root, tiers)
    checkpointer.track(model=_model(size_bytes, 1.0))
    checkpointer.save(1, checkpointer._tracked.capture(1))


def restore(root: str, size_bytes: int, tiers: dict[str, Any] | None, source: str) -> dict[str, float]:
    """Measures `restore` alone. `source`: how the URIs of the parts must begin that it reads."""
    model = _model(size_bytes, 0.0)
    checkpointer = _checkpointer(root, tiers)
    checkpointer.track(model=model)
    _provide_memory(2 * size_bytes)
    read: list[str] = []
    take = checkpointer._roots.loaded

    def taken(newest: Any, verified: frozenset[str]) -> None:
        read.extend(verified)
        take(newest, verified)

    checkpointer._roots.loaded = taken  # type: ignore[method-assign]
    begin_s = time.perf_counter()
    step = checkpointer.restore()
    took_s = time.perf_counter() - begin_s
    assert step == 1 and all(bool((values == 1.0 + number).all()) for number, values in enumerate(model))
    assert read and all(uri.startswith(source) for uri in read), read
    return {"restore_s": took_s}


def train(root: str, size_bytes: int, steps: int, step_s: float, rounds: int) -> list[dict[str, float]]:
    """Measures a training on one thread: without checkpoints, with one each 10 steps to tiers, and to the root only."""
    state = _state(size_bytes)
    matrix = np.random.default_rng(3).random((512, 512), np.float32)

    def step_once(products: int) -> None:
        for _ in range(products):
            matrix @ matrix
        for value in state.values():
            value += 1

    def timed(products: int) -> float:
        begin_s = time.perf_counter()
        step_once(products)
        return time.perf_counter() - begin_s

    _provide_memory(6 * size_bytes)
    timed(50)
    base_s = min(timed(0) for _ in range(5))
    products = max(1, round((step_s - base_s) / ((min(timed(50) for _ in range(5)) - base_s) / 50)))
    ways = {
        "none_s": None,
        "tiers_s": _checkpointer(f"{root}/tiers", {"idle_s": 60}, background=True),
        "root_s": _checkpointer(f"{root}/alone", None, background=True),
    }
    found: list[dict[str, float]] = []
    step = 0
    for _ in range(1 + rounds):
        measured = {}
        for name, checkpointer in ways.items():
            begin_s = time.perf_counter()
            for _ in range(steps):
                step_once(products)
                step += 1
                if checkpointer is not None and step % 10 == 0:
                    checkpointer.only_due_tiers()
                    checkpointer.try_save(step, {"model": state}, background=True)
            measured[name] = time.perf_counter() - begin_s
            if checkpointer is not None:
                checkpointer.wait()
        found.append(measured)
    return found[1:]


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(globals()[asked.pop("do")](**asked)))
