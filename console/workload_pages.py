"""Workloads: a list with filters, one workload, its logs, and the forms that change it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import yaml
from fastapi import Depends, Query, Request, Response
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool

from api.auth import Caller, Operator, Role, Submitter, Viewer
from api.people.holders import holders_of_any, wanted_by
from api.people.tenants import list_tenants
from api.problems import HttpProblem, invalid
from api.routing import Router
from api.state import StateOf
from api.streams.events import EventView, newest_events
from api.streams.log_choice import MAX_TAIL, LogQuery
from api.streams.logs import read_logs
from api.workloads import actions
from api.workloads.queue import why
from api.workloads.routes import get_progress, get_workload, list_attempts, list_workloads
from api.workloads.submission import submit
from api.workloads.victims import victims_of
from api.workloads.views import WorkloadView
from api.workloads.workload_queries import names_of
from console.cookies import Form
from console.curves import progress_charts
from console.log_cuts import cut_tasks, whole_elements
from console.pages import TOP, page, temporal_link
from console.timeline import timeline
from domain.ids import workload_workflow_id
from domain.phases import PLACED_PHASES, QUEUED_PHASES, TERMINAL_PHASES, Phase
from domain.priority import LOWEST_LEVEL

router = Router(prefix=TOP, include_in_schema=False)
_ROWS = 50
_EVENTS = 50
_HOLDERS = 20
_LOG_LINES = 500
_LOG_BYTES = 1 << 18
_MOST_BYTES = 2 * _LOG_BYTES
"""With what is written while the page is made, and the lines that say that others are left out."""
_ALL_ELEMENTS = 1 << 31
"""Above all indexes of elements."""
_EXAMPLE = """version: 1
name: hello
tenant: {tenant}
jobs:
  - name: trainer
    tasks: 2
    resources: {{accelerators: "{gpu}:1", cpus: 1, memory: 256MiB}}
    run: echo "rank $RANK of $WORLD_SIZE meets the others at $MASTER_ADDR:$MASTER_PORT"
"""
FILTERS = ("phase", "tenant", "name", "label", "array")
"""Names of the filters of lists."""
Filter = Annotated[str, Query(max_length=300)]
PhaseFilter = Annotated[str, Query(pattern=f"^({'|'.join(['', *Phase, 'held', 'blocked', 'live'])})$")]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Returns the node of a text."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def _yaml(spec: Mapping[str, Any]) -> str:
    return yaml.dump(dict(spec), Dumper=_Dumper, sort_keys=False)


def _url(id_: str) -> str:
    return f"{TOP}/workloads/{id_}"


@router.get("/workloads")
def show_workloads(
    request: Request,
    state: StateOf,
    caller: Viewer,
    *,
    phase: PhaseFilter = "",
    tenant: Filter = "",
    name: Filter = "",
    label: Filter = "",
    array: Filter = "",
    cursor: Filter = "",
) -> Response:
    """Shows the workloads that match the filters, newest first: an array as one, or the elements of an array."""
    given: Any = [phase] if phase else None
    found = list_workloads(
        state, caller, tenant=tenant or None, phase=given, label=[label] if label else None, name=name or None,
        array=array or None, limit=_ROWS, cursor=cursor or None,
    )  # fmt: skip
    filters = {"phase": phase, "tenant": tenant, "name": name, "label": label, "array": array}
    phases = ["live", *Phase, "held", "blocked"]
    return page(request, "workloads.html", found=found, filters=filters, phases=phases, cursor=cursor)


@router.get("/workloads/new")
def show_submission(request: Request, state: StateOf, caller: Submitter) -> Response:
    """Shows the form that submits a document."""
    tenants = list_tenants(state, caller, 1).items
    if not tenants:
        return page(request, "submit.html", document="", problem=None, is_first=True)
    gpu = min(tenants[0].quota.gpus, default="gpu")
    document = _EXAMPLE.format(tenant=tenants[0].name, gpu=gpu)
    return page(request, "submit.html", document=document, problem=None)


@router.post("/workloads/new")
async def submit_document(request: Request, state: StateOf, caller: Submitter, form: Form) -> Response:
    """Submits the document from the form. If it is invalid, shows the form again with the errors."""
    document = form.get("document", "")
    body = document.replace("\r\n", "\n").encode()
    try:
        made = await state.documents.run(caller, body, partial(submit, state, caller, "application/yaml", body, None))
    except HttpProblem as problem:
        return page(
            request, "submit.html", status=problem.status_code, document=document, problem=problem.to_json()
        )  # fmt: skip
    return RedirectResponse(_url(made.id), 303)


@router.get("/workloads/{id}")
def show_workload(request: Request, id: str, state: StateOf, caller: Viewer) -> Response:
    """Shows one workload: its phase with the reason, its phases over time, its progress, document and events."""
    found = get_workload(id, state, caller)
    attempts = list_attempts(id, state, caller, _ROWS, str(max(0, found.attempt - _ROWS))).items
    with state.transaction() as session:
        events = newest_events(session, caller, found.id, _EVENTS)
        victims = victims_of(session, caller, found.id, _ROWS)
        related = [one.evictor for one in attempts if one.evictor] + ([found.element.array] if found.element else [])
        names = names_of(session, caller, related)
        wanted = wanted_by(found.jobs) if found.phase in QUEUED_PHASES else []
        held = holders_of_any(session, caller, wanted)[:_HOLDERS] if wanted else []
    chart = timeline(found, attempts)
    return page(
        request, "workload.html", workload=found, why=why(id, state, caller), attempts=attempts,
        chart=chart, events=_joined(events), victims=victims, wanted=wanted, holders=held, names=names,
        curves=progress_charts(get_progress(id, state, caller).points, chart.begin, chart.end),
        document=_yaml(found.spec),
        temporal=temporal_link(state, caller, workload_workflow_id(found.id)),
        may=_may(found, caller),
        levels=range(found.level + 1, LOWEST_LEVEL + 1),
    )  # fmt: skip


def _joined(events: Sequence[EventView]) -> list[tuple[EventView, int]]:
    """Returns events, newest first, with the checkpoints between two other events as one: the newest, and how many."""
    out: list[tuple[EventView, int]] = []
    for one in events:
        if out and one.kind == out[-1][0].kind == "workload.checkpoint" and one.attempt == out[-1][0].attempt:
            out[-1] = out[-1][0], out[-1][1] + 1
        else:
            out.append((one, 1))
    return out


def _may(found: WorkloadView, caller: Caller) -> set[str]:
    """Returns the actions that the page offers. The API checks each of them again."""
    if not caller.may(Role.SUBMITTER):
        return set()
    may, has_ended = {"clone"}, found.phase in TERMINAL_PHASES
    if not has_ended:
        may |= {"cancel", "lower"}
    # An array has the phase of its elements, and stays in the queue until the last of them has started.
    if found.phase in QUEUED_PHASES or (found.array is not None and not has_ended):
        may.add("hold" if found.held_by is None else "release")
    if found.phase in PLACED_PHASES and found.array is None and caller.may(Role.OPERATOR):
        may.add("preempt")
    return may


@router.get("/workloads/{id}/clone")
def clone(request: Request, id: str, state: StateOf, caller: Submitter) -> Response:
    """Shows the form that submits a document, with the document of a workload."""
    document = _yaml(get_workload(id, state, caller).spec)
    return page(request, "submit.html", document=document, problem=None)


@router.post("/workloads/{id}/cancel")
def cancel(id: str, state: StateOf, caller: Submitter, _: Form) -> Response:
    """Cancels a workload."""
    return RedirectResponse(_url(actions.cancel(id, state, caller, None).id), 303)


@router.post("/workloads/{id}/hold")
def hold(id: str, state: StateOf, caller: Submitter, _: Form) -> Response:
    """Holds a workload in the queue."""
    return RedirectResponse(_url(actions.hold(id, state, caller).id), 303)


@router.post("/workloads/{id}/release")
def release(id: str, state: StateOf, caller: Submitter, _: Form) -> Response:
    """Ends the hold of a workload."""
    return RedirectResponse(_url(actions.release(id, state, caller).id), 303)


@router.post("/workloads/{id}/preempt")
def preempt(id: str, state: StateOf, caller: Operator, _: Form) -> Response:
    """Preempts a workload."""
    return RedirectResponse(_url(actions.preempt(id, state, caller).id), 303)


@router.post("/workloads/{id}/lower")
def lower(id: str, state: StateOf, caller: Submitter, form: Form) -> Response:
    """Lowers the priority of a workload."""
    level = form.get("level", "")
    if not (level.isascii() and level.isdigit() and 1 <= int(level[:3]) <= LOWEST_LEVEL):
        raise invalid("level", f"must be a level from 1 to {LOWEST_LEVEL}", level)
    return RedirectResponse(_url(actions.change(id, actions.WorkloadChange(level=int(level)), state, caller).id), 303)


@router.post("/workloads/{id}/retry")
async def retry(id: str, state: StateOf, caller: Submitter, _: Form) -> Response:
    """Submits the document of a workload again."""
    found = await run_in_threadpool(get_workload, id, state, caller)
    body = yaml.safe_dump(found.spec, sort_keys=False).encode()
    made = await state.documents.run(caller, body, partial(submit, state, caller, "application/yaml", body, None))
    return RedirectResponse(_url(made.id), 303)


@dataclass(frozen=True)
class _LogFilters:
    """Which lines of a workload's logs are shown, as in the form: an empty text chooses all."""

    job: Filter = ""
    task: Annotated[str, Query(pattern="^[0-9]{0,9}$")] = ""
    attempt: Annotated[str, Query(pattern="^[0-9]{0,9}$")] = ""
    search: Filter = ""

    def query(self) -> LogQuery:
        """Returns the same as the API's parameters."""
        return LogQuery(
            job=self.job or None, task=int(self.task) if self.task else None,
            attempt=int(self.attempt) if self.attempt else None, contains=self.search or None, tail=_LOG_LINES,
        )  # fmt: skip


@router.get("/workloads/{id}/logs")
async def show_logs(
    request: Request,
    id: str,
    state: StateOf,
    caller: Viewer,
    chosen: Annotated[_LogFilters, Depends()],
    older: Annotated[int, Query(ge=0, le=MAX_TAIL - _LOG_LINES)] = 0,
    before: Annotated[int | None, Query(ge=0, le=_ALL_ELEMENTS)] = None,
) -> Response:
    """Shows the last lines of each task's output; with a text, the last lines that contain it.

    `older`: leaves out so many of the newest lines. Of an array, the elements with the highest indexes are shown, the
    highest first; `before`: only those with lower indexes.
    """
    workload = await run_in_threadpool(get_workload, id, state, caller)
    # Lines of an array come element by element; `read` bounds how many elements are read.
    first = (before if before is not None else _ALL_ELEMENTS) if workload.array else None
    stream = await read_logs(id, state, caller, chosen.query(), tail_bytes=_LOG_BYTES, skip=older, before=first)
    content, is_all = await stream.read(_LOG_BYTES if workload.array else _MOST_BYTES)
    text, following = content.decode("utf-8", "replace"), None
    if workload.array and not is_all:
        text, following = whole_elements(text, workload.name)
    cut = [] if workload.array or chosen.search else cut_tasks(text, _LOG_LINES)
    return await run_in_threadpool(
        partial(
            page, request, "logs.html", workload=workload, text=text, filters=asdict(chosen), lines=_LOG_LINES, cut=cut,
            kib=_LOG_BYTES >> 10, older=older, before=before, following=following,
            oldest=MAX_TAIL - _LOG_LINES,
        )
    )  # fmt: skip
