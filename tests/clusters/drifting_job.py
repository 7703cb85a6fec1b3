"""A training in miniature, `drifting_job.py RESULT GATE`: a value changes at random, and depends on all steps before.

It writes its number of steps and its value to RESULT when GATE exists.
"""

import random
import sys
import time
from pathlib import Path


def changed(value: float) -> float:
    """Returns the value after one more step."""
    return 0.999 * value + random.gauss(0.0, 1.0)


def main(result: Path, gate: Path) -> None:
    """Runs until `gate` exists."""
    import mizzen

    random.seed(7)
    state = {"value": 0.0}
    checkpointer = mizzen.Checkpointer()
    checkpointer.track(state=state)
    step = checkpointer.restore()
    while not gate.exists():
        time.sleep(0.05)
        step, state["value"] = step + 1, changed(state["value"])
        checkpointer.step(step)
    result.write_text(f"{step} {state['value']!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
