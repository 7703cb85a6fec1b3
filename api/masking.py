"""Masks the ids of workloads in reasons and events for keys that may not see those workloads.

A tenant sees that its workload was evicted, or waits for slots, but not the ids of other tenants' workloads.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import Caller
from domain.masking import ID, mask_ids, named
from infra.db.models import Workload

V = TypeVar("V", bound=BaseModel)
_NOT_SEARCHED = frozenset({"id", "workload", "spec", "labels", "name", "jobs", "tables", "progress", "load",
                           "after"})  # fmt: skip
"""Response fields that are not masked: they describe a workload that the caller may see, or its owner wrote them."""


def mask(session: Session, caller: Caller, view: V) -> V:
    """Returns `view` with the ids of workloads that `caller` may not see replaced by their number."""
    if caller.tenant is None:
        return view
    body = {name: value for name, value in view.model_dump().items() if name not in _NOT_SEARCHED}
    found = {id_ for text in _texts(body) for id_ in ID.findall(text)}
    if not found:
        return view
    own = select(Workload.id).where(Workload.id.in_(found), Workload.tenant == caller.tenant)
    seen = frozenset(session.scalars(own))
    if found <= seen:
        return view
    return type(view).model_validate({**view.model_dump(), **_masked(body, seen, is_answer=True)})


def _texts(value: Any, *, is_answer: bool = True) -> Iterator[str]:
    """Yields all strings in the masked fields of a response. Within `detail`, every field is masked."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            if not (is_answer and name in _NOT_SEARCHED):
                yield from _texts(part, is_answer=is_answer and name != "detail")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, is_answer=is_answer)


def _masked(value: Any, seen: frozenset[str], *, is_answer: bool) -> Any:
    if isinstance(value, str):
        return mask_ids(value, seen)
    if isinstance(value, dict):
        return {
            name: part
            if is_answer and name in _NOT_SEARCHED
            else _masked(part, seen, is_answer=is_answer and name != "detail")
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        if value and all(isinstance(part, str) and ID.fullmatch(part) for part in value):
            return named(list(value), seen)
        return [_masked(part, seen, is_answer=is_answer) for part in value]
    return value
