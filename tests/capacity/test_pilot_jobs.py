"""What a line of `squeue` says about a pilot: whether it waits, when it ends, and why."""

import pytest

from capacity.providers.slurm.jobs import FIELDS, PilotJob
from domain import agent_exits

_LINE = {
    "JobID": "7", "State": "RUNNING", "exit_code": "0", "RestartCnt": "0", "SubmitTime": "100", "StartTime": "200",
    "EndTime": "1000", "PreemptTime": "N/A", "NodeList": "n1", "Name": "in-1", "Comment": "mizzen:1", "Reason": "None",
}  # fmt: skip
_LOG = "its log is in-1.log in the provider's folder"


def _job(**columns: str) -> PilotJob:
    line = {**_LINE, **columns}
    return PilotJob.of_line("".join(f"{line[name]:{width}}|" for name, width in FIELDS.items()))


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


@pytest.mark.parametrize(
    ("columns", "ended"),
    [
        ({"State": "COMPLETING"}, False),
        ({"State": "PENDING", "StartTime": "N/A", "EndTime": "N/A", "Reason": "BeginTime"}, True),
        ({"State": "RUNNING"}, True),
        ({"State": "FAILED", "exit_code": "2:0", "Reason": "NonZeroExitCode"}, True),
        ({"State": "CANCELLED", "exit_code": "0:15"}, True),
    ],
)
def test_a_requeued_job_ended_with_its_first_run(columns: dict[str, str], *, ended: bool) -> None:
    """From the end of its first run's processes on, a requeued job has this reason, whatever the next run does."""
    found = _job(RestartCnt="1", **columns).ended
    assert found == (agent_exits.SAID[agent_exits.RESTARTED] if ended else None)


def _number(number: int | None) -> dict[str, object]:
    return {"set": number is not None, "infinite": False, "number": number or 0}


@pytest.mark.parametrize(
    ("states", "code", "signal", "waits", "ended"),
    [
        (["RUNNING"], 0, None, False, None),
        (["RUNNING", "CONFIGURING"], 0, None, True, None),
        (["CANCELLED", "COMPLETING"], 0, None, False, None),
        (["FAILED"], 3, None, False, f"its agent ended with exit status 3 (NonZeroExitCode); {_LOG}"),
        (["FAILED"], None, 9, False, f"its agent ended with signal 9 (NonZeroExitCode); {_LOG}"),
    ],
)
def test_jobs_of_slurmrestd(
    states: list[str], code: int | None, signal: int | None, waits: bool, ended: str | None
) -> None:
    """A job of v0.0.42, and the same job of v0.0.38, are read as the line of `squeue` for it."""
    own = {"job_id": 7, "restart_cnt": 0, "nodes": "n1", "name": "in-1", "comment": "mizzen:1"}
    own["state_reason"] = "NonZeroExitCode" if ended else "None"
    times = {"submit_time": 100, "start_time": 200, "end_time": 1000, "preempt_time": 0}
    later = {
        **own,
        **{name: _number(at_s) for name, at_s in times.items()},
        "job_state": states,
        "exit_code": {"status": [], "return_code": _number(code), "signal": {"id": _number(signal), "name": ""}},
    }
    earlier = {**own, **times, "job_state": states[-1], "exit_code": (code or 0) << 8 | (signal or 0)}
    line = _job(State=states[-1], exit_code=str(earlier["exit_code"]), Reason=str(own["state_reason"]))
    found = [job.found(kill_wait_s=5) for job in (line, PilotJob.of_json(earlier), PilotJob.of_json(later))]
    assert found[0] == found[1] == found[2]
    assert (found[0].waits is not None, found[0].ended) == (waits, ended)
