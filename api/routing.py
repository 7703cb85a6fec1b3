"""Routes that serialise an endpoint's view without validating it again, and refuse what an endpoint would ignore.

By default FastAPI validates the returned value against the declared model, in another thread. A view was already
validated when it was constructed. It also ignores unknown query parameters, so a misspelt `dry_run` would make a change
and a misspelt filter would list everything; and of a parameter or a JSON key that is given twice it uses the last one.
"""

import inspect
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from functools import partial, wraps
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from fastapi import APIRouter, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from api.problems import HttpProblem, ProblemType, fields_of, invalid, nearest, shown
from api.views import View


class ViewRoute(APIRoute):
    """A route that serialises a view to JSON in the thread that created it."""

    def __init__(self, path: str, endpoint: Callable[..., Any], *, status_code: int | None = None, **options: Any):
        super().__init__(path, _answering(endpoint, status_code or 200), status_code=status_code, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI. The handler first checks the query."""
        handler = super().get_route_handler()
        if not self.path.startswith("/v1/"):  # Temporal's UI has parameters of its own.
            return handler
        known = _parameters(self.dependant)

        async def checked(request: Request) -> Response:
            for name, number in Counter(name for name, _ in request.query_params.multi_items()).items():
                if name not in known:
                    raise _unknown_parameter(name, known)
                if number > 1 and not known[name]:
                    raise invalid(f"query.{name}", "is given twice; it has one value")
            return await handler(_StrictRequest(request.scope, request.receive))

        return checked


class _StrictRequest(Request):
    """A request whose JSON body must not have a key twice in one object."""

    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise HttpProblem(ProblemType.MALFORMED_REQUEST, f"the body has the key {shown(twice)!r} twice in one object")
    return made


def _parameters(dependant: Dependant) -> dict[str, bool]:
    """Returns the query parameters of an endpoint, by name: whether the parameter may be repeated."""
    found: dict[str, bool] = {}
    for part in dependant.dependencies:
        found |= _parameters(part)
    for field in dependant.query_params:
        annotation = field.field_info.annotation
        for name, type_ in (fields_of(annotation) or {field.alias: annotation}).items():
            found[name] = any(get_origin(part) is list for part in (type_, *get_args(type_)))
    return found


def _unknown_parameter(name: str, known: Iterable[str]) -> HttpProblem:
    near = nearest(name, known)
    right = f"did you mean {near}?" if near else f"the known ones are {', '.join(sorted(known)) or 'none'}"
    return invalid(f"query.{shown(name)}", f"unknown parameter; {right}")


def _answering(endpoint: Callable[..., Any], status_code: int) -> Callable[..., Any]:
    """Wraps `endpoint`: the view that it returns becomes a JSON response. With the status 204 the response has no body.

    Asynchronous endpoints, endpoints that add headers and endpoints that return something else are returned unchanged.
    """
    hints = get_type_hints(endpoint)
    made = hints.pop("return", None)
    is_complete = isinstance(made, type) and issubclass(made, View | NoneType)
    if inspect.iscoroutinefunction(endpoint) or not is_complete or Response in hints.values():
        return endpoint

    @wraps(endpoint)
    def answer(*args: Any, **kwargs: Any) -> Any:
        view = endpoint(*args, **kwargs)
        if view is None:
            return Response(status_code=status_code)
        if type(view) is not made:
            return view
        return Response(view.model_dump_json(by_alias=True), status_code, media_type="application/json")

    return answer


Router = partial(APIRouter, route_class=ViewRoute)
"""A router whose routes are of class `ViewRoute`."""
