"""A gang that is preempted, and whose agent is killed, computes the same bytes in every mode of isolation."""

import hashlib
from collections.abc import Iterable

import pytest

from tests.isolation.conftest import PATIENCE_S, Engine, submit
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
_STEPS, _TASKS = 240, 2


@pytest.fixture(scope="module", params=["sandbox", "none", "user", "sandbox of an ordinary user", "container"])
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


def test_a_gang_ends_with_the_same_bytes(stack: Up, engine: Engine | None) -> None:
    """Its tasks exchange their states at every step, save, and are stopped and started again in the middle.

    Before and after that the agent is killed. The tasks go on, and the next agent takes them over.
    """
    text = (ROOT / "tests" / "isolation" / "gang.py").read_text()
    run = f"cat > gang.py <<'END'\n{text}END\n" + f'exec "$MIZZEN_PYTHON" gang.py {_STEPS}'
    gang = submit(stack, "victim", run, None if engine is None else engine.image, _TASKS)
    client = stack.client()
    wait_until(lambda: "step 20" in _said(client.logs(gang)), "the gang has made some steps", PATIENCE_S)
    stack.kill("server agents")
    wait_until(lambda: "step 40" in _said(client.logs(gang)), "the next agent ships the output of the gang", PATIENCE_S)
    client.preempt(gang)
    wait_until(
        lambda: stack.phase(gang) == "running" and "step 80" in _said(client.logs(gang)), "it goes on", PATIENCE_S
    )
    stack.kill("server agents")
    wait_until(lambda: stack.ended(gang), "the gang has ended", PATIENCE_S)
    shown = client.workload(gang)
    assert (shown["phase"], shown["attempt"]) == ("succeeded", 2), client.why(gang)
    said = _said(client.logs(gang, follow=True))
    assert sorted(line for line in said if line.startswith("rank ")) == _expected()
    assert any(line.startswith("resumed") and line != "resumed at 0" for line in said)
