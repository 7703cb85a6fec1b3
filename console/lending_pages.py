"""Lending: the machines that owners lend, and the page of one owner, with the button that takes the machine back."""

from typing import Annotated, Literal

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse

from api.auth import AnyKey, Caller, Role, Viewer
from api.fleet import machines
from api.fleet.machines import CordonBody
from api.fleet.owner_view import get_lending
from api.problems import HttpProblem, ProblemType
from api.routing import Router
from api.state import StateOf
from api.views import reason_view
from console.cookies import Form
from console.pages import TOP, owner_page, page
from domain.ids import machine_id
from infra.db.lent_machines import NOTHING_GIVEN, given_by, lent_machines

router = Router(prefix=TOP, include_in_schema=False)
_ROWS = 50
_PATH = "/lending/{region}/{cluster}/{machine}"
_NOTE = "taken back by its owner in the console"


@router.get("/lending")
def show_lending(
    request: Request, state: StateOf, _: Viewer, after: Annotated[str, Query(max_length=300)] = ""
) -> Response:
    """Shows the machines that owners lend, and the GPU hours that each has given."""
    with state.transaction() as session:
        found = lent_machines(session, after, _ROWS + 1)
        given = given_by(session, [one.id for one in found[:_ROWS]])
        rows = [(one, given.get(one.id, NOTHING_GIVEN), reason_view(one.notice)) for one in found[:_ROWS]]
        following = found[_ROWS - 1].id if len(found) > _ROWS else None
        return page(request, "lending.html", rows=rows, after=after, following=following)


@router.get(_PATH)
def show_owner(request: Request, region: str, cluster: str, machine: str, state: StateOf, caller: AnyKey) -> Response:
    """Shows the workloads on a machine and the GPU hours that it has given. The machine's own key can read it."""
    found = get_lending(region, cluster, machine, state, caller)
    return page(request, "owner.html", machine=found, may_take=_may_take(caller, found.machine))


@router.post(_PATH + "/{action}")
def change(
    region: str, cluster: str, machine: str, action: Literal["take", "lend"], state: StateOf, caller: AnyKey, _: Form
) -> Response:
    """Takes a machine back, as a drain (its workloads save and leave), or lends it again."""
    id_ = machine_id(region, cluster, machine)
    if not _may_take(caller, id_):
        message = f"machine {id_}: only its own key or an operator can take it back"
        raise HttpProblem(ProblemType.FORBIDDEN, message)
    if action == "take":
        machines.drain(region, cluster, machine, state, caller, CordonBody(reason=_NOTE))
    else:
        machines.undrain(region, cluster, machine, state, caller)
    return RedirectResponse(owner_page(id_), 303)


def _may_take(caller: Caller, machine: str) -> bool:
    return caller.may(Role.OPERATOR) or caller.machine == machine
