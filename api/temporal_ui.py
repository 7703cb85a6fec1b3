"""`/temporal`: the UI of the embedded Temporal, for operators. Browsers ask for the key, which is the password.

The UI may change and end every workflow, and listens only on a Unix socket. `/temporal/codec` decrypts the payloads
that the UI shows. It has Temporal's protocol of remote codecs, which the `temporal` command also uses. It sends no
headers of CORS, so pages of other origins cannot read its answers.
"""

from collections.abc import AsyncIterator, Callable
from enum import StrEnum

import httpx
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from temporalio.api.common.v1 import Payload, Payloads

from api.auth import Operator
from api.bodies import JsonOnly
from api.problems import HttpProblem, ProblemType, invalid, not_found
from api.routing import Router
from api.state import StateOf
from infra.errors import MizzenError
from infra.payload_codec import EncryptingCodec
from infra.temporal_client import CODEC_PATH, UI_PATH

router = Router()
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "proxy-authenticate"}
_OWN = _OF_CONNECTION | {"authorization", "host", "content-length"}


class CodecVerb(StrEnum):
    """The operation of the codec on payloads: encode or decode."""

    DECODE = "decode"
    ENCODE = "encode"


@router.post(CODEC_PATH + "/{verb}", include_in_schema=False, dependencies=[JsonOnly])
async def temporal_codec(state: StateOf, _: Operator, verb: CodecVerb, request: Request) -> Response:
    """Decrypts or encrypts payloads. A payload that cannot be decrypted is returned unchanged."""
    codec = state.payload_codec
    if codec is None:
        raise not_found("page", CODEC_PATH)
    try:
        given = Parse(await request.body(), Payloads())
    except (ParseError, UnicodeDecodeError) as error:
        raise invalid("body", f"must be Payloads of Temporal as JSON: {error}") from None
    work = codec.encrypt if verb is CodecVerb.ENCODE else _decrypted(codec)
    done = Payloads(payloads=[work(payload) for payload in given.payloads])
    return Response(MessageToJson(done, indent=None), media_type="application/json")


def _decrypted(codec: EncryptingCodec) -> Callable[[Payload], Payload]:
    def decrypted(payload: Payload) -> Payload:
        try:
            return codec.decrypt(payload)
        except MizzenError:
            return payload

    return decrypted


@router.api_route(UI_PATH, methods=_METHODS, include_in_schema=False)
@router.api_route(UI_PATH + "/{path:path}", methods=_METHODS, include_in_schema=False)
async def temporal_ui(state: StateOf, _: Operator, request: Request) -> Response:
    """Passes a request on to the UI."""
    client = state.temporal_ui
    if client is None:
        raise not_found("page", UI_PATH)
    headers = [(name, value) for name, value in request.headers.items() if name not in _OWN]
    # The raw path, as it was sent: ids of workflows contain slashes, which the UI encodes.
    asked: bytes = request.scope["raw_path"] + b"?" * bool(request.url.query) + request.url.query.encode()
    url = httpx.URL("http://temporal-ui", raw_path=asked)
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
