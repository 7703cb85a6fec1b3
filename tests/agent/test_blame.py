"""The table of launch errors and their blame: it is complete, documented, and covers what agents raise."""

import errno
from pathlib import Path

import pytest

from agent.failures import launch_failure
from agent.ports import TooManyPorts
from agent.staging import BucketUnavailable
from domain.blame import TABLE, Blame, LaunchError, verdict
from infra.archives import BadArchive


def _markdown() -> str:
    """Returns the table in Markdown, as `docs/operating.md` shows it."""
    rows = [f"| `{error.value}` | {row.blame.value} | {row.meaning} |" for error, row in TABLE.items()]
    return "\n".join(["| error | blames | when |", "| --- | --- | --- |", *rows])


def test_the_table_is_complete_and_documented(checkout: Path) -> None:
    """Every error of the closed list has a verdict, and docs/operating.md shows the same table."""
    assert set(TABLE) == set(LaunchError)
    assert _markdown() in (checkout / "docs" / "operating.md").read_text()


@pytest.mark.parametrize(
    ("error", "kind", "blame"),
    [
        (OSError(errno.ENOSPC, "full"), "DiskFull", Blame.NOBODY),
        (OSError(errno.EDQUOT, "quota"), "DiskFull", Blame.NOBODY),
        (OSError(errno.EIO, "broken"), "MachineFault", Blame.MACHINE),
        (BucketUnavailable("down"), "BucketUnavailable", Blame.NOBODY),
        (BadArchive("a link", "evil"), "BadArchive", Blame.WORKLOAD),
        (TooManyPorts("99"), "TooManyPorts", Blame.WORKLOAD),
    ],
)
def test_what_agents_raise(error: Exception, kind: str, blame: Blame) -> None:
    """Errors of the operating system, of the bucket and of the user get different types and blames."""
    for final in (False, True):
        told = launch_failure(error, final=final)
        assert getattr(told, "type", None) == kind and verdict(kind).blame is blame
        assert getattr(told, "non_retryable", None) == (final or TABLE[LaunchError(kind)].final)


def test_an_error_that_nobody_knows_blames_nobody() -> None:
    """Agents of other versions may raise any error: an unknown error blames neither the workload nor the machine."""
    assert verdict("KeyError").blame is verdict(None).blame is Blame.NOBODY
    odd = KeyError("x")
    assert launch_failure(odd, final=True) is odd
