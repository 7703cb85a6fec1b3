"""Actions on all workloads that match a filter: the count with a form, then the result."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response

from api.auth import Caller, Role, Submitter
from api.problems import HttpProblem, invalid
from api.routing import Router
from api.state import ApiState, StateOf
from api.workloads import actions
from api.workloads.selection import Filters, count_live, live_matching, matching
from console.cookies import Form
from console.pages import TOP, page
from console.queue_page import MOST_COUNTED
from console.workload_pages import FILTERS, Filter, PhaseFilter

router = Router(prefix=TOP, include_in_schema=False)
_MOST = 500
"""Workloads of one action."""
_DONE = {"cancel": "cancelled", "hold": "put on hold", "release": "released", "preempt": "preempted"}


@router.get("/workloads/bulk")
def show_bulk(
    request: Request,
    state: StateOf,
    caller: Submitter,
    phase: PhaseFilter = "",
    tenant: Filter = "",
    name: Filter = "",
    label: Filter = "",
    array: Filter = "",
) -> Response:
    """Shows how many live workloads match the filters, and the actions on them."""
    filters = {"phase": phase, "tenant": tenant, "name": name, "label": label, "array": array}
    wanted = _matching(caller, filters)
    with state.transaction() as session:
        newest = live_matching(session, wanted, None, 1)
        count = count_live(session, wanted, MOST_COUNTED + 1)
    return page(
        request, "bulk.html", filters=filters, count=count, newest=newest[0] if newest else "", most=_MOST,
        most_counted=MOST_COUNTED, actions=_actions(caller), done=None,
    )  # fmt: skip


@router.post("/workloads/bulk")
def act(request: Request, state: StateOf, caller: Submitter, form: Form) -> Response:
    """Applies an action to the matching workloads that were submitted before the count, and shows the result."""
    action = form.get("action", "")
    if action not in _actions(caller):
        raise invalid("action", f"must be one of {', '.join(_actions(caller))}", action)
    filters = {name: form.get(name, "")[:300] for name in FILTERS}
    with state.transaction() as session:
        ids = live_matching(session, _matching(caller, filters), form.get("newest", "")[:300], _MOST)
    refused: Counter[str] = Counter()
    for id_ in ids:
        try:
            _act(action, state, caller, id_)
        except HttpProblem as problem:
            refused[problem.detail.replace(id_, "…")] += 1
    return page(
        request, "bulk.html", filters=filters, count=len(ids), newest="", most=_MOST, most_counted=MOST_COUNTED,
        actions=[], done=_DONE[action], refused=refused.most_common(20), refusals=refused.total(),
    )  # fmt: skip


def _matching(caller: Caller, filters: dict[str, str]) -> Any:
    phase: Any = [filters["phase"]] if filters["phase"] else None
    label = [filters["label"]] if filters["label"] else None
    chosen = Filters(filters["tenant"] or None, phase, label, filters["name"] or None, filters["array"] or None)
    return matching(caller, chosen)


def _actions(caller: Caller) -> list[str]:
    return [action for action in _DONE if action != "preempt" or caller.may(Role.OPERATOR)]


def _act(action: str, state: ApiState, caller: Caller, id_: str) -> None:
    if action == "cancel":
        actions.cancel(id_, state, caller, None)
        return
    does: dict[str, Callable[[str, ApiState, Caller], Any]] = {
        "hold": actions.hold, "release": actions.release, "preempt": actions.preempt,
    }  # fmt: skip
    does[action](id_, state, caller)
