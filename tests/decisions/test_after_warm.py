"""No request waits for a compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

from domain.machine_code import folder_of, is_complete
from infra.errors import StackError
from infra.stack.compilation import compile_loops
from tests.decoys import Decoys
from tests.stack.harness import ROOT


@pytest.mark.long
def test_warming_loads_all_that_decisions_need() -> None:
    """Bids, evictions, awards, reservations and scans need no signature that precompilation did not load."""
    command = [sys.executable, "-m", "tests.decisions.after_warm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.rotating
async def test_the_stack_compiles_once_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack compiles once per version, before any process starts, and prints a message; a failure is an error.

    The compilers import nothing from the current folder.
    """
    decoys = Decoys(tmp_path)
    monkeypatch.chdir(decoys.path)
    said: list[str] = []
    folder = folder_of(str(ROOT / "rms"))
    assert folder is not None
    (Path(folder) / "complete").unlink(missing_ok=True)
    assert not is_complete("rms")
    with pytest.raises(StackError, match=r"No module named activities\.nothing"):
        await compile_loops(said.append, "activities.nothing")
    await compile_loops(said.append)
    assert is_complete("gms") and is_complete("rms")
    assert len(said) == 2 and "compiling" in said[1]
    await compile_loops(said.append)
    assert len(said) == 2
    assert decoys.imported() == ""
