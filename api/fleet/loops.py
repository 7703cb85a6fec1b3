"""Endpoint for the periodic loops of the installation: whether their rounds succeed."""

from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from api.auth import Operator
from api.routing import Router
from api.state import StateOf
from api.views import View
from infra.db.rounds import FAILING_AFTER, loop_states

router = Router(prefix="/v1", tags=["fleet"])


class LoopView(View):
    """A periodic loop, and how its last rounds ended."""

    name: str = Field(examples=["deletion of replicas"])
    state: Literal["ok", "failing", "late"] = Field(
        description=f"`failing`: at least {FAILING_AFTER} rounds in a row have failed; `late`: no round has succeeded"
        " for longer than it should take"
    )
    succeeded_at: datetime | None = Field(description="When a round last succeeded; may be a minute old; null: never")
    failing_since: datetime | None = Field(description="When the first of the failed rounds ended; null: none failed")
    failures: int = Field(description="Number of consecutive failed rounds")
    error: str | None = Field(description="Error of the last round, if it failed")


class LoopList(View):
    """Loops, sorted by name."""

    items: list[LoopView]


@router.get("/loops", summary="List periodic loops")
def list_loops(state: StateOf, _: Operator) -> LoopList:
    """Lists the loops that keep the installation in order, such as the deletion of old data, with their failures."""
    with state.transaction() as session:
        found, now_s = loop_states(session)
    return LoopList(
        items=[
            LoopView(
                name=name, state=loop.judge(now_s), succeeded_at=_at(loop.succeeded_at_s),
                failing_since=_at(loop.failing_since_s), failures=loop.failures, error=loop.error or None,
            )
            for name, loop in found.items()
        ]
    )  # fmt: skip


def _at(epoch_s: float | None) -> datetime | None:
    return None if epoch_s is None else datetime.fromtimestamp(epoch_s, UTC)
