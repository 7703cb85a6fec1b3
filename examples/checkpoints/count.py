"""A training loop with a model of one number, which continues from its newest checkpoint: count.py URL."""

import sys
import time

import mizzen

STEPS = 600


class Model:
    """One weight. `state_dict` and `load_state_dict` are all that a tracked object needs."""

    def __init__(self) -> None:
        self.weight = 0.0

    def step(self) -> None:
        """Moves the weight towards 1."""
        self.weight += 0.01 * (1.0 - self.weight)

    def state_dict(self) -> dict[str, float]:
        """Returns the state to save."""
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores a saved state."""
        self.weight = state["weight"]


def main() -> None:
    """Trains to the end, saving at most five times a second."""
    model = Model()
    checkpointer = mizzen.Checkpointer(sys.argv[1], interval_s=0.2)
    checkpointer.track(model=model)
    step = checkpointer.restore()
    print(f"resumed at step {step}" if step else "started at step 0", flush=True)
    while step < STEPS:
        model.step()
        time.sleep(0.01)
        step += 1
        checkpointer.step(step)
    print(f"finished at step {step} with weight {model.weight:.6f}")


if __name__ == "__main__":
    main()
