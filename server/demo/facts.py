"""Reads the history of a demo run from the API: allocations, attempts and events."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mizzen_client import Client


@dataclass(frozen=True)
class Hold:
    """A period in which one task held one GPU slot; times are seconds since the epoch."""

    machine: str
    slot: int
    workload: str
    name: str
    tenant: str
    attempt: int
    task: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class AttemptFact:
    """One attempt of a workload."""

    workload: str
    name: str
    attempt: int
    region: str
    resumed_step: int | None
    last_step: int | None
    checkpoint_step: int | None
    start_s: float
    end_s: float
    outcome: str


@dataclass(frozen=True)
class Facts:
    """The history of a whole run."""

    workloads: dict[str, dict[str, Any]]
    """Id to the workload as the API shows it, with submitted_s and finished_s."""
    holds: tuple[Hold, ...]
    attempts: tuple[AttemptFact, ...]
    events: tuple[dict[str, Any], ...]
    machines: tuple[tuple[str, str, str | None, int], ...]
    """(id, region, GPU type, slots)."""

    def attempts_of(self, workload: str) -> list[AttemptFact]:
        """Returns a workload's attempts, oldest first."""
        return [a for a in self.attempts if a.workload == workload]


def _seconds(at: str | None, default: float) -> float:
    return default if at is None else datetime.fromisoformat(at).timestamp()


def read_facts(client: Client, now_s: float) -> Facts:
    """Reads the history up to now. Holds and attempts that have not ended get the end time `now_s`."""
    workloads = {row["id"]: row for row in sorted(client.workloads(), key=lambda row: row["id"])}
    attempts = [
        AttemptFact(
            workload=id_,
            name=row["name"],
            attempt=a["attempt"],
            region=a["region"],
            resumed_step=a["resumed_step"],
            last_step=a["last_step"],
            checkpoint_step=a["checkpoint_step"],
            start_s=_seconds(a["started_at"] or a["awarded_at"], now_s),
            end_s=_seconds(a["released_at"], now_s),
            outcome=a["outcome"]["code"] if a["outcome"] else "",
        )
        for id_, row in workloads.items()
        for a in sorted(client.attempts(id_), key=lambda a: a["attempt"])
    ]
    holds = [
        Hold(
            machine=held["machine"],
            slot=slot,
            workload=id_,
            name=row["name"],
            tenant=row["tenant"],
            attempt=held["attempt"],
            task=f"{task['job']}/{task['task']}",
            start_s=_seconds(held["held_at"], now_s),
            end_s=_seconds(held["released_at"], now_s),
        )
        for id_, row in workloads.items()
        for held in client.allocations(id_)
        if held["held_at"] is not None
        for task in held["tasks"]
        for slot in task["slots"]
    ]
    return Facts(
        workloads={
            id_: {
                **row,
                "submitted_s": _seconds(row["submitted_at"], now_s),
                "finished_s": _seconds(row["finished_at"], now_s),
            }
            for id_, row in workloads.items()
        },
        holds=tuple(holds),
        attempts=tuple(attempts),
        events=tuple({**event, "at_s": _seconds(event["at"], now_s)} for event in client.events()),
        machines=tuple((m["id"], m["region"], m["gpu_type"], m["gpus"]) for m in client.machines()),
    )
