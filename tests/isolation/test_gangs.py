"""A gang that is preempted computes the same bytes in every mode of isolation."""

import hashlib
from collections.abc import Iterable

import pytest

from tests.isolation.conftest import Engine, submit
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = pytest.mark.long
_STEPS, _TASKS = 120, 2


@pytest.fixture(scope="module", params=["sandbox", "none", "user", "container"])
def mode(request: pytest.FixtureRequest) -> str:
    """The mode of isolation of the stack."""
    return str(request.param)


def _expected() -> list[str]:
    states = [str(rank) for rank in range(_TASKS)]
    for _ in range(_STEPS):
        told = "".join(states)
        states = [hashlib.sha256(f"{state} {told}".encode()).hexdigest() for state in states]
    return sorted(f"rank {rank}: {state}" for rank, state in enumerate(states))


def _said(lines: Iterable[bytes]) -> list[str]:
    return [line.decode().rpartition("| ")[2] for line in lines]


def test_a_preempted_gang_ends_with_the_same_bytes(stack: Up, engine: Engine | None) -> None:
    """Its tasks exchange their states at every step, save, and are stopped and started again in the middle."""
    text = (ROOT / "tests" / "isolation" / "gang.py").read_text()
    run = f"cat > gang.py <<'END'\n{text}END\n" + f'exec "$MIZZEN_PYTHON" gang.py {_STEPS}'
    gang = submit(stack, "victim", run, None if engine is None else engine.image, _TASKS)
    client = stack.client()
    wait_until(lambda: "step 20" in _said(client.logs(gang)), "the gang has made some steps")
    client.preempt(gang)
    wait_until(lambda: stack.ended(gang), "the gang has ended")
    shown = client.workload(gang)
    assert (shown["phase"], shown["attempt"]) == ("succeeded", 2), client.why(gang)
    said = _said(client.logs(gang, follow=True))
    assert sorted(line for line in said if line.startswith("rank ")) == _expected()
    assert any(line.startswith("resumed") and line != "resumed at 0" for line in said)
