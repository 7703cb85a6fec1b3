"""`/temporal`: the UI of the embedded Temporal, for operators. Browsers ask for the key, which is the password.

The UI may change and end every workflow, and listens only on a Unix socket.
"""

from collections.abc import AsyncIterator

import httpx
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from api.auth import Operator
from api.problems import HttpProblem, ProblemType, not_found
from api.routing import Router
from api.state import StateOf
from infra.temporal_client import UI_PATH

router = Router()
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "proxy-authenticate"}
_OWN = _OF_CONNECTION | {"authorization", "host", "content-length"}


@router.api_route(UI_PATH, methods=_METHODS, include_in_schema=False)
@router.api_route(UI_PATH + "/{path:path}", methods=_METHODS, include_in_schema=False)
async def temporal_ui(state: StateOf, _: Operator, request: Request) -> Response:
    """Passes a request on to the UI."""
    client = state.temporal_ui
    if client is None:
        raise not_found("page", UI_PATH)
    headers = [(name, value) for name, value in request.headers.items() if name not in _OWN]
    url = httpx.URL("http://temporal-ui", path=request.url.path, query=request.url.query.encode())
    passed = client.build_request(request.method, url, headers=headers, content=await request.body())
    try:
        answer = await client.send(passed, stream=True)
    except httpx.HTTPError as error:
        raise HttpProblem(ProblemType.SCHEDULER_UNAVAILABLE, f"Temporal's UI does not answer: {error}") from None
    response = StreamingResponse(_pieces(answer), answer.status_code)
    response.raw_headers = [(k, v) for k, v in answer.headers.raw if k.decode().lower() not in _OF_CONNECTION]
    return response


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()
