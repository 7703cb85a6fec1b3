"""Tests of `mizzen.integrations.ddp` with two processes and gloo."""

from pathlib import Path

from mizzen.checkpoint import list_committed
from mizzen.integrations import ddp
from tests_integrations.scripts import run_gang

BEGIN = """
from torch import distributed
from mizzen.checkpoint import CheckpointError, StaleAttemptError
from mizzen.integrations import ddp
distributed.init_process_group("gloo")
rank = distributed.get_rank()
"""


def passes(text: str, folder: Path, **variables: str) -> None:
    """Runs a script on two ranks. Both must succeed."""
    script = folder / "script.py"
    script.write_text(BEGIN + text)
    for ended in run_gang(script, folder, **variables):
        assert ended.code == 0, ended.output


def test_the_greatest_number_wins_on_all_ranks(tmp_path: Path) -> None:
    """Each call returns the maximum over all ranks, whichever rank has it."""
    passes("agree = ddp.agreement()\nassert [agree(n) for n in ([0, 3, 1], [2, 0, 1])[rank]] == [2, 3, 1]", tmp_path)


def test_alone_the_number_is_what_it_is() -> None:
    """Without a process group, the function returns its argument."""
    assert ddp.agreement()(5) == 5


def test_rank_0_claims_for_all(tmp_path: Path) -> None:
    """Both ranks of a gang get the attempt after the last one, or the attempt that the environment gives."""
    text = "one = ddp.checkpointer()\nassert (one.attempt, one.gang.rank) == ({attempt}, rank), one.attempt\n"
    text += "one.save({attempt}, {{'rng': [rank], 'model': 'same'}})"
    uri = str(tmp_path / "root")
    for attempt in (1, 2):
        passes(text.format(attempt=attempt), tmp_path, MIZZEN_CHECKPOINT_URI=uri)
    passes(text.format(attempt=7), tmp_path, MIZZEN_CHECKPOINT_URI=uri, MIZZEN_ATTEMPT="7")
    newest = list_committed(uri, verify=True)[0]
    assert sorted((part.name, part.rank) for part in newest.parts if part.name == "rng") == [("rng", 0), ("rng", 1)]
    assert len([part for part in newest.parts if part.name == "model"]) == 1
    passes(
        "try:\n    ddp.checkpointer(attempt=3)\nexcept StaleAttemptError:\n    pass\nelse:\n    raise SystemExit(3)",
        tmp_path,
        MIZZEN_CHECKPOINT_URI=uri,
    )


def test_a_root_that_rank_0_cannot_claim_is_an_error_on_all(tmp_path: Path) -> None:
    """If rank 0 cannot claim the root, all ranks raise an error instead of waiting forever."""
    (tmp_path / "root").write_text("not a folder")
    passes(
        "try:\n    ddp.checkpointer()\nexcept (CheckpointError, OSError) as error:\n    print(error)\n"
        "else:\n    raise SystemExit(3)",
        tmp_path,
        MIZZEN_CHECKPOINT_URI=str(tmp_path / "root"),
    )
