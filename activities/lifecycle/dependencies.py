"""The round that decides dependencies on times, and ends workloads with a dependency that can never hold."""

from sqlalchemy import Engine, select, text

from domain.phases import Phase
from infra.db.array_rows import end_elements_in_vain, stop_waiting
from infra.db.dependencies import dependencies_of
from infra.db.models import Workload
from infra.db.queued_end import end_queued
from infra.db.session import transaction

_AT_ONCE = 1000
_DUE = text(
    "update dependency set state = 'met', decided_at = now() where (workload, place) in ("
    " select workload, place from dependency where state = 'waiting' and due_at <= now()"
    f" order by workload limit {_AT_ONCE} for update skip locked) returning workload"
)
_NEVER = (
    select(Workload.id)
    # The condition of the index `workload_never`.
    .where(text("finished_at is null and blocked = 'never' and spec ->> 'if_never' = 'end'"))
    .order_by(Workload.id)
    .limit(_AT_ONCE)
    .with_for_update(skip_locked=True)
)


def decide_dependencies(engine: Engine) -> list[str]:
    """Decides dependencies whose time has come. Ends workloads whose dependencies can never hold; returns their ids.

    The end of a workload decides the dependencies on it, so this repeats until the last one of a chain has ended. Also
    ends elements of arrays whose dependencies on elements of other arrays can never hold.
    """
    while len(_pass_due(engine)) == _AT_ONCE:
        pass
    ended: list[str] = []
    while True:
        found = _end_never(engine)
        if not found and not _end_elements(engine):
            return ended
        ended += found


def _pass_due(engine: Engine) -> list[str]:
    with transaction(engine) as session:
        return list(session.scalars(_DUE))


def _end_elements(engine: Engine) -> bool:
    with transaction(engine) as session:
        return end_elements_in_vain(session, _AT_ONCE)


def _end_never(engine: Engine) -> list[str]:
    with transaction(engine) as session:
        ending = {}
        for workload, depends in dependencies_of(session, session.scalars(_NEVER).all()).items():
            reason = depends[0].reason()
            assert reason is not None, f"{workload} is blocked, but its first dependency holds"
            ending[workload] = reason, reason.detail
        stop_waiting(session, ending, whole=True)
        end_queued(session, Phase.CANCELLED, ending)
        return list(ending)
