"""Routes that serialise an endpoint's view without validating it again.

By default FastAPI validates the returned value against the declared model, in another thread. A view was already
validated when it was constructed.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from types import NoneType
from typing import Any, get_type_hints

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute

from api.views import View


class ViewRoute(APIRoute):
    """A route that serialises a view to JSON in the thread that created it."""

    def __init__(self, path: str, endpoint: Callable[..., Any], *, status_code: int | None = None, **options: Any):
        super().__init__(path, _answering(endpoint, status_code or 200), status_code=status_code, **options)


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
