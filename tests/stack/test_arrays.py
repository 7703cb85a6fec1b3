"""Arrays on a running stack: their elements run with their parameters, and the commands count and change them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.harness import Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
_COMMAND = Path(sys.executable).parent / "mizzen"
_SWEEP = """
version: 1
name: sweep
tenant: t
array:
  matrix: {lr: [0.1, 0.01], seed: [1, 2, 3]}
  exclude: [{lr: 0.01, seed: 3}]
  throttle: 3
jobs:
  - name: main
    resources: {cpus: 0.1, memory: 64MiB}
    env: {RATE: "{{ lr }}"}
    run: |
      echo "$MIZZEN_ARRAY_INDEX $MIZZEN_PARAM_LR $MIZZEN_PARAM_SEED $RATE {{ index }} {{ seed }} {{{{ braces }}"
      test "$MIZZEN_PARAM_SEED" != 3
"""


def _mizzen(stack: Up, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    key = (stack.data / "operator.key").read_text().strip()
    environ = {**os.environ, "MIZZEN_API": stack.client().url, "MIZZEN_API_KEY": key}
    done = subprocess.run(
        [_COMMAND, *arguments], env=environ, text=True, input=stdin, capture_output=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_sweep(shared: Up) -> None:
    """Each element runs once with its parameters, and commands know the array and its elements by name."""
    code, out, err = _mizzen(shared, "submit", "-", stdin=_SWEEP)
    assert code == 0, err
    array = out.strip()
    assert _mizzen(shared, "wait", "sweep")[0] == 1, "an element has failed"
    for index, (rate, seed) in enumerate([("0.1", 1), ("0.1", 2), ("0.1", 3), ("0.01", 1), ("0.01", 2)]):
        code, out, err = _mizzen(shared, "logs", "-f", f"sweep/{index}")
        assert out == f"{index} {rate} {seed} {rate} {index} {seed} {{{{ braces }}}}\n", err
    lines = "sweep/0: 0 0.1 1 0.1 0 1 {{ braces }}\nsweep/1: 1 0.1 2 0.1 1 2 {{ braces }}\n"
    assert _mizzen(shared, "logs", "sweep", "--grep", "^[01] 0.1", "--since", "1h", "--tail", "1")[1] == lines
    assert _mizzen(shared, "logs", "sweep", "--follow", "--grep", "0.1 [12] 0.1")[1] == lines
    code, out, err = _mizzen(shared, "ls", "--name", "sweep")
    assert "failed 5/5, 1 failed" in out and len(out.splitlines()) == 2, out
    code, out, err = _mizzen(shared, "show", "sweep")
    assert "5 (4 succeeded, 1 failed), at most 3 at a time" in out, out
    assert "failed elements\n  2: " in out, out
    assert "2 of " in _mizzen(shared, "show", "sweep/2")[1]
    assert "4 of 5 elements succeeded" in _mizzen(shared, "why", "sweep")[1]
    # What has failed can be submitted again, with the same parameters.
    code, again, err = _mizzen(shared, "retry", array, "--failed")
    assert code == 0, err
    assert _mizzen(shared, "wait", again.strip())[0] == 1
    assert _mizzen(shared, "logs", "-f", f"{again.strip()}/2")[1].startswith("2 0.1 3")
    found = json.loads(_mizzen(shared, "show", again.strip(), "-o", "json")[1])
    assert found["array"]["elements"] == found["array"]["failed"] == 1


@pytest.mark.long
def test_elements_of_the_same_index(shared: Up) -> None:
    """An element starts when that of its index has succeeded; the others end with the reason."""
    job = "jobs: [{name: main, resources: {cpus: 0.1, memory: 64MiB}, run: 'exit {{ code }}'}]\n"
    first = f"version: 1\nname: part\ntenant: t\narray: {{list: [{{code: 0}}, {{code: 0}}, {{code: 1}}]}}\n{job}"
    after = "after: [{workload: part, same_index: true}]\n"
    second = f"version: 1\nname: whole\ntenant: t\narray: {{matrix: {{code: [0, 0, 0]}}}}\n{after}{job}"
    for document in (first, second):
        code, out, err = _mizzen(shared, "submit", "-", stdin=document)
        assert code == 0, err
    assert "the element of the same index of part" in _mizzen(shared, "show", "whole")[1]
    assert _mizzen(shared, "wait", "whole")[0] == 1
    code, out, err = _mizzen(shared, "ls", "--name", "whole")
    assert "cancelled 3/3" in out, out
    assert "it depends on part/2" in _mizzen(shared, "why", "whole/2")[1]
    assert shared.phase(f"{json.loads(_mizzen(shared, 'show', 'whole', '-o', 'json')[1])['id']}-1") == "succeeded"


@pytest.mark.rotating
def test_cancel_and_throttle(shared: Up) -> None:
    """An array is throttled, released, and cancelled in parts and as a whole."""
    options = ("--tenant", "t", "--no-files", "--cpus", "0.1", "--memory", "64MiB", "--name", "many", "--detach")
    code, out, err = _mizzen(shared, "run", *options, "--array", "0-9999%2", "--", "sleep", "600")
    assert code == 0, err
    array = out.strip()
    client = shared.client()

    def live(number: int) -> bool:
        running = client.workloads(array=array, phases=("running",))
        return sum(1 for _ in running) == number

    wait_until(lambda: live(2), "two elements run")
    assert "the throttle of the array is 2" in _mizzen(shared, "why", "many")[1]
    assert "the throttle of the array is 2" in _mizzen(shared, "why", "many/9999")[1]
    assert _mizzen(shared, "throttle", "many", "4")[0] == 0
    wait_until(lambda: live(4), "four elements run")
    assert _mizzen(shared, "cancel", "many/1")[0] == 0
    wait_until(lambda: shared.phase(f"{array}-1") == "cancelled", "one element is cancelled")
    wait_until(lambda: live(4), "the next element runs")
    assert _mizzen(shared, "cancel", "many/9000")[0] == 0
    assert shared.phase(f"{array}-9000") == "cancelled"
    assert _mizzen(shared, "cancel", "many", "--waiting")[0] == 0
    counts = client.workload(array)["array"]
    assert counts is not None and (counts["waiting"], counts["live"]) == (0, 4)
    assert "none of its elements waits" in _mizzen(shared, "why", "many")[1]
    assert _mizzen(shared, "cancel", "many")[0] == 0
    wait_until(lambda: shared.phase(array) == "cancelled", "the array is cancelled")
    assert client.workload(array)["array"]["cancelled"] == 10_000  # type: ignore[index]


@pytest.mark.rotating
def test_stdout_and_stderr_of_an_array(shared: Up) -> None:
    """With `output: separate`, the errors of all elements are read alone; other documents refuse it."""
    job = {"name": "main", "output": "separate", "resources": {"cpus": 0.1, "memory": "64MiB"}}
    job["run"] = "echo fine {{ index }}; echo bad {{ index }} >&2"
    document = {"version": 1, "name": "apart", "tenant": "t", "array": "0-2", "jobs": [job]}
    assert _mizzen(shared, "submit", "-", stdin=json.dumps(document))[0] == 0
    assert _mizzen(shared, "wait", "apart")[0] == 0
    _, out, err = _mizzen(shared, "logs", "-f", "apart", "--stderr")
    assert sorted(out.splitlines()) == [f"apart/{index}: bad {index}" for index in range(3)], err
    assert _mizzen(shared, "logs", "apart/1", "--stdout")[1] == "fine 1\n"
    assert sorted(_mizzen(shared, "logs", "apart/1")[1].splitlines()) == ["bad 1", "fine 1"]
    del job["output"]
    [merged] = _mizzen(shared, "submit", "-", "--wait", stdin=json.dumps({**document, "array": "0"}))[1].split()[:1]
    assert "`output: separate`" in _mizzen(shared, "logs", merged, "--stderr")[2]
