"""A machine that is lost for good while it runs elements of an array: judged by what their tasks have written."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.fleet import power_off
from server.agents import machine_state_dir
from tests.stack.harness import Up, wait_until
from tests.stack.test_arrays import _mizzen

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400), pytest.mark.long]
_CPUS = 4
_FLEET = f"""
version: 1
regions:
  - name: r
    clusters:
      - name: c
        machines: [{{name: m, count: 4, cpus: {_CPUS}, memory: 4GiB, owner: "{os.getuid()}"}}]
"""
_ELEMENTS = 24
_DOCUMENT = """
version: 1
name: lost
tenant: t
array: {indexes: 0-%d%s}
jobs:
  - name: main
    resources: {cpus: 1, memory: 64MiB}
    run: |
      echo "begun $MIZZEN_ARRAY_INDEX $PWD" >> %s
      sleep $((1 + MIZZEN_ARRAY_INDEX %% 4 * 2))
      echo "done $MIZZEN_ARRAY_INDEX $PWD" >> %s
"""


_KINDS = {"bundles": "", "runners": ", runners: true", "at most once": ", runners: {at_most_once: true}"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack with a machine for each kind of array, and one more."""
    up = Up(tmp_path_factory.mktemp("lost"), _FLEET)
    try:
        up.start(timeout_s=240)
        up.client().set_tenant("t", 3, {}, None)
        yield up
    finally:
        up.close()


@pytest.mark.parametrize("kind", _KINDS)
def test_every_element_is_done_although_its_machine_is_lost(stack: Up, tmp_path: Path, kind: str) -> None:
    """Each element is done at least once, and its row says so. With `at_most_once`, none is begun twice, and only
    elements that ran on the lost machine fail.
    """
    journal = tmp_path / "journal"
    text = _DOCUMENT % (_ELEMENTS - 1, _KINDS[kind], journal, journal)
    code, out, err = _mizzen(stack, "submit", "-", stdin=text)
    assert code == 0, err
    array = out.strip()
    wait_until(lambda: len(_lines(journal, "done")) >= 3, "some elements are done")
    lost = next(one for one in stack.ready_machines() if _on(stack, one, _lines(journal, "begun")[-1]))
    power_off(machine_state_dir(stack.data, lost))
    wait_until(lambda: stack.phase(array) in ("succeeded", "failed"), "the array ends", 240)
    begun = Counter(int(line.split()[1]) for line in _lines(journal, "begun"))
    done = Counter(int(line.split()[1]) for line in _lines(journal, "done"))
    rows = stack.client().workloads(array=array)
    phases = {row["element"]["index"]: row["phase"] for row in rows if row["element"]}
    assert len(phases) == _ELEMENTS
    failed = {index for index, phase in phases.items() if phase != "succeeded"}
    cut_off = [
        line for line in _lines(journal, "begun") if line.replace("begun", "done") not in _lines(journal, "done")
    ]
    assert cut_off and all(_on(stack, lost, line) for line in cut_off)
    if kind == "at most once":
        # A runner of the lost machine had leased one element, which had perhaps not begun, or was done.
        assert max(begun.values()) == 1 and begun.keys() - done.keys() <= failed and len(failed) <= _CPUS
    else:
        assert done.keys() == set(range(_ELEMENTS)) and not failed


def _lines(journal: Path, word: str) -> list[str]:
    return [line for line in journal.read_text().splitlines() if line.startswith(word)] if journal.exists() else []


def _on(up: Up, machine: str, line: str) -> bool:
    return line.split()[2].startswith(f"{machine_state_dir(up.data, machine)}/")
