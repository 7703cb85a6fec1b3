"""Random simulations of workload workflows: each handles its messages in order and late, like the real workflow."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from domain.phases import Phase
from domain.protocol.workload_messages import MessageKind
from domain.reasons import ReasonCode
from domain.task_reports import TaskProgress
from infra.db.logs import Outbox
from tests.activities.world import World

_ENDS = {
    MessageKind.EVICT: Phase.PREEMPTED,
    MessageKind.PREEMPT: Phase.PREEMPTED,
    MessageKind.MACHINE_LOST: Phase.PENDING,
    MessageKind.CANCEL: Phase.CANCELLED,
}


@dataclass
class _Life:
    attempt: int = 0
    stage: str = "queued"
    """`queued`, `waiting` (for slots), `ready`, `running` or `over`."""
    cancelled: bool = False
    mail: list[dict[str, Any]] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)


class Lives:
    """The simulated workflows of all workloads."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world = world
        self._chance = chance
        self._lives: dict[str, _Life] = {}
        self._read = 0
        self.unconfirmed: list[tuple[str, str]] = []
        """Machine and run of each stop request that a machine's workflow has not carried out yet."""

    def fetch(self) -> None:
        """Reads new outbox rows in order, as the dispatcher does."""
        with self._world.session() as session:
            for row in session.scalars(select(Outbox).where(Outbox.id > self._read).order_by(Outbox.id)):
                self._read = row.id
                if row.kind == "unconfirmed":
                    self.unconfirmed.append((row.body["machine"], row.body["run"]))
                if row.workload is not None:
                    life = self._lives.setdefault(row.workload, _Life())
                    if row.kind == "mail":
                        life.mail.append(row.body)

    def alive(self) -> list[str]:
        """Returns the ids of the workloads that have not ended."""
        return sorted(w for w, life in self._lives.items() if life.stage != "over")

    def step(self, workload: str) -> None:
        """Lets one workload handle its next message; without one it may start or end."""
        life = self._lives[workload]
        if life.mail:
            self._take(workload, life, life.mail.pop(0))
        elif life.stage == "ready":
            self._world.change(workload, Phase.PROVISIONING, life.attempt)
            self._world.change(workload, Phase.RUNNING, life.attempt)
            life.stage = "running"
            life.machines = sorted(self._world.holdings(workload, life.attempt))
        elif life.stage == "running" and self._chance.random() < 0.3:
            phase = self._chance.choice([Phase.SUCCEEDED, Phase.PENDING])
            unheard = self._chance.sample(life.machines, 1) if self._chance.random() < 0.3 else []
            self._end(workload, life, phase, silent=unheard if phase is Phase.PENDING else [])

    def _take(self, workload: str, life: _Life, mail: dict[str, Any]) -> None:
        kind, attempt = MessageKind(mail["kind"]), mail["attempt"]
        if kind is MessageKind.AWARDED:
            assert life.stage == "queued" and attempt == life.attempt + 1
            life.attempt, life.stage = attempt, "ready" if mail["detail"]["ready"] else "waiting"
            if life.cancelled:
                self._end(workload, life, Phase.CANCELLED)
        elif life.stage == "over" or attempt not in (0, life.attempt):
            return
        elif kind is MessageKind.SLOTS_READY:
            # A lost machine may have ended the attempt first: the workload is queued again and ignores this message.
            assert life.stage in ("waiting", "queued")
            life.stage = "ready" if life.stage == "waiting" else "queued"
        elif life.stage != "queued":
            if life.stage == "running" and self._chance.random() < 0.5:
                self._world.change(workload, Phase.CHECKPOINTING, life.attempt)
            lost = mail["detail"].get("machine") if kind is MessageKind.MACHINE_LOST else None
            silent = [lost] if lost and life.stage == "running" else []
            self._end(workload, life, _ENDS[kind], lost, silent, mail["detail"].get("code"))
        elif kind is MessageKind.CANCEL:
            life.cancelled = not self._world.change(workload, Phase.CANCELLED, life.attempt)
            life.stage = "queued" if life.cancelled else "over"

    def _end(
        self, workload: str, life: _Life, phase: Phase, blames: str | None = None, silent: Sequence[str] = (),
        code: str | None = None,
    ) -> None:  # fmt: skip
        progress = [TaskProgress("main", 0, step=life.attempt, checkpoint_step=life.attempt, checkpoint_at_s=1.0)]
        for _ in range(self._chance.choice([1, 1, 2])):  # an activity may run twice
            why = None if code is None else ReasonCode(code)
            self._world.release(workload, phase, life.attempt, blames, progress, silent, code=why)
        life.stage = "queued" if phase in (Phase.PENDING, Phase.PREEMPTED) else "over"
