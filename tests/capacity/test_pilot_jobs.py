"""What a line of `squeue` says about a pilot: whether it waits, when it ends, and why."""

import pytest

from capacity.providers.slurm.jobs import FIELDS, PilotJob

_LINE = {
    "JobID": "7", "State": "RUNNING", "exit_code": "0", "RestartCnt": "0", "SubmitTime": "100", "StartTime": "200",
    "EndTime": "1000", "PreemptTime": "N/A", "NodeList": "n1", "Name": "in-1", "Comment": "mizzen:1", "Reason": "None",
}  # fmt: skip


def _job(**columns: str) -> PilotJob:
    line = {**_LINE, **columns}
    return PilotJob("".join(f"{line[name]:{width}}|" for name, width in FIELDS.items()))


@pytest.mark.parametrize(
    ("columns", "ends_at_s", "because"),
    [
        ({}, 1000.0, None),
        ({"PreemptTime": "500", "EndTime": "520"}, 520.0, "Slurm preempts the job"),
        # The end of a job that is being ended is when Slurm has sent SIGTERM. It is no time limit.
        ({"State": "COMPLETING", "EndTime": "500"}, 530.0, "cancelled (scancel)"),
        ({"State": "PENDING", "EndTime": "N/A", "StartTime": "N/A"}, None, None),
    ],
)
def test_the_end_that_is_known_before(columns: dict[str, str], ends_at_s: float | None, because: str | None) -> None:
    """The end has its true time and reason, which is the time limit only for a job that Slurm lets run until then."""
    found = _job(**columns).found(kill_wait_s=30.0)
    assert (found.ends_at_s, found.ended) == (ends_at_s, None)
    assert (found.ends_because is None) == (because is None)
    assert (because or "") in (found.ends_because or "")
