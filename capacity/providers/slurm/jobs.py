"""Derives the state of a machine from Slurm's record of its pilot job: waits, ends, and the reasons."""

from collections.abc import Mapping
from typing import Any

from capacity.provider import FoundMachine
from domain import agent_exits

ENDS = {
    "BOOT_FAIL": "node {nodes} did not boot",
    "CANCELLED": "the job was cancelled (scancel, or an administrator)",
    "COMPLETED": "its agent has ended",
    "DEADLINE": "the job could not start before its deadline",
    "FAILED": "its agent ended with {end} ({reason}); its log is {name}.log in the provider's folder",
    "NODE_FAIL": "node {nodes} has failed",
    "OUT_OF_MEMORY": "the job used more memory than it has",
    "PREEMPTED": "Slurm preempted the job",
    "REVOKED": "another cluster of the federation runs the job",
    "TIMEOUT": "the job reached its time limit",
}
"""The states in which a job has ended. In all others it exists: COMPLETING is not an end."""
_WAITING = {"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_COMPLETING = "it was cancelled (scancel) or preempted, has reached its time limit, or its agent has ended"
"""Slurm names the reason only when all processes of the job have ended."""
_REFUSED = "BadConstraints"
_NOT_STARTED = "JobLaunchFailure"
"""The reason of a job whose script was not started: the folder of its log is not on the node, or the node failed."""
FIELDS = {
    "JobID": 20, "State": 20, "exit_code": 12, "RestartCnt": 8, "SubmitTime": 20, "StartTime": 20, "EndTime": 20,
    "PreemptTime": 20, "NodeList": 80, "Name": 64, "Comment": 64, "Reason": 160,
}  # fmt: skip
"""The columns of `squeue -O`, with their widths."""
FORMAT = ",".join(f"{name}:{width}|" for name, width in FIELDS.items())


def native_id(job: str, instance: str) -> str:
    """Returns the provider's id of an instance's job."""
    return f"{job}.{instance}"


class PilotJob:
    """A job, as Slurm shows it."""

    def __init__(self, found: Mapping[str, str]) -> None:
        """`found` has the columns of `FIELDS`."""
        self.id, self.state, self.name, self.comment = (found[key] for key in ("JobID", "State", "Name", "Comment"))
        self.nodes, self.reason = found["NodeList"], found["Reason"]
        self.restarts = int(found["RestartCnt"] or 0)
        self._exit = found["exit_code"]
        self.submitted_s, self._start_s, self._end_s, self._preempted_s = (
            _seconds(found[key]) for key in ("SubmitTime", "StartTime", "EndTime", "PreemptTime")
        )

    @classmethod
    def of_line(cls, line: str) -> "PilotJob":
        """Parses a line of `squeue` in `FORMAT`.

        Raises:
            ValueError: it is not one.
        """
        parts = [part.strip() for part in line.split("|", len(FIELDS) - 1)]
        if len(parts) < len(FIELDS):
            raise ValueError(f"squeue: {line!r} has {len(parts)} columns, not {len(FIELDS)}")
        found = dict(zip(FIELDS, parts, strict=True))
        return cls({**found, "Reason": found["Reason"].rstrip("|").strip()})

    @classmethod
    def of_json(cls, job: Mapping[str, Any]) -> "PilotJob":
        """Takes a job of slurmrestd. Numbers are objects, and states are lists, from v0.0.40 on.

        Raises:
            KeyError, TypeError, ValueError: it has not the fields of a job.
        """
        times = {"SubmitTime": "submit_time", "StartTime": "start_time", "EndTime": "end_time"}
        times["PreemptTime"] = "preempt_time"
        names = {"NodeList": "nodes", "Name": "name", "Comment": "comment", "Reason": "state_reason"}
        return cls(
            {
                "JobID": str(int(job["job_id"])),
                "State": _state(job["job_state"]),
                "exit_code": _exit_code(job["exit_code"]),
                "RestartCnt": str(int(job["restart_cnt"])),
                **{key: str(_number(job[field]) or "") for key, field in times.items()},
                **{key: str(job[field]) for key, field in names.items()},
            }
        )

    @property
    def native_id(self) -> str:
        """The provider's id of the machine. A controller that crashed gives the numbers of lost jobs to other jobs."""
        return native_id(self.id, self.name)

    @property
    def runs(self) -> bool:
        """Whether the job has started and not ended."""
        return self.state not in _WAITING and self.ended is None

    @property
    def never_accepted(self) -> bool:
        """Whether the controller refused the job: it keeps a record of such a job for a while."""
        return self.state == "FAILED" and self.reason == _REFUSED

    def found(self, kill_wait_s: float, leaves: str | None = None) -> FoundMachine:
        """Returns the job as a machine of the provider. `kill_wait_s`: the time from SIGTERM to SIGKILL."""
        waits = self.state in _WAITING
        ends_at_s, because = self._end_s, None if self._preempted_s is None else "Slurm preempts the job"
        if self.state == "COMPLETING" and ends_at_s is not None:
            # It is then the time of SIGTERM. Before, it was the time limit, or the end of a preemption's grace.
            ends_at_s, because = ends_at_s + kill_wait_s, f"the job is COMPLETING: {_COMPLETING}"
        return FoundMachine(
            self.native_id,
            self.name,
            self.submitted_s or 0.0,
            waits=f"{self.state.lower()}, {self.reason}" if waits else None,
            starts_at_s=self._start_s if waits else None,
            ends_at_s=None if waits else ends_at_s,
            ends_because=because,
            leaves=leaves,
            ended=self.ended,
        )

    @property
    def ended(self) -> str | None:
        """Why the job has ended; None: it exists.

        The machine of a job that Slurm has requeued has ended with the first run, however the next one ends: it fails
        before the script exits if Slurm still cleans up after the first.
        """
        if self.restarts and self.state != "COMPLETING":
            return agent_exits.SAID[agent_exits.RESTARTED]
        said = ENDS.get(self.state)
        if said is None:
            return None
        if self.state == "FAILED" and self.reason == _NOT_STARTED:
            return (
                f"node {self.nodes} could not start the job ({_NOT_STARTED}): the node failed meanwhile, or has no"
                " folder for the job's log; the log of the node's slurmd says more"
            )
        status, by = _end(self._exit)
        if self.state == "FAILED" and status in agent_exits.SAID:
            return agent_exits.SAID[status]
        end = f"signal {by}" if by else f"exit status {status}"
        return said.format(nodes=self.nodes, end=end, reason=self.reason, name=self.name)


def _seconds(text: str) -> float | None:
    """Parses a time in seconds since the epoch; None: Slurm knows none (`N/A`, `NONE`, `Unknown`)."""
    return float(text) if text.isdigit() else None


def _number(found: Any) -> int:
    """Returns a number of slurmrestd; 0: it has none."""
    if isinstance(found, Mapping):
        return int(found["number"]) if found["set"] and not found["infinite"] else 0
    return int(found or 0)


def _state(found: str | list[str]) -> str:
    """Returns the state that `squeue` would show: flags, which follow the state, are more precise."""
    states = [found] if isinstance(found, str) else found
    if "COMPLETING" in states:
        return "COMPLETING"
    return next((one for one in reversed(states) if one in _WAITING or one in ENDS), states[0])


def _exit_code(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"{_number(found['return_code'])}:{_number(found['signal']['id'])}"
    return str(int(found or 0))


def _end(text: str) -> tuple[int, int]:
    """Parses the exit status, and the signal (0: none): 22.05 writes what `wait` returns, later `status:signal`."""
    status, colon, by = text.partition(":")
    return (int(status or 0), int(by or 0)) if colon else (int(text or 0) >> 8, int(text or 0) & 127)
