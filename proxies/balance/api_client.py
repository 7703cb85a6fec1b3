"""The API as the balancer uses it: lists of replicas, the event stream, and reports of counts."""

import asyncio
import json
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import httpx

from proxies.balance.counts import Second
from proxies.balance.values import Service, certificate_in, parse_service

EVENT = "service.endpoints"
_ANSWER_S = 10.0
_SILENCE_S = 45.0
"""The stream sends a comment every 15 s. If nothing arrives for this time, the connection counts as lost."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_INVALID = frozenset({400, 404, 409, 413, 422})
"""Statuses of responses to a report after which a retry is useless."""
_log = logging.getLogger(__name__)


class Api:
    """A client of the API."""

    def __init__(self, url: str, key: str | None, tls: ssl.SSLContext) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        host = httpx.URL(url).host
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"), headers=headers, timeout=_ANSWER_S, verify=tls,
            trust_env=host not in ("localhost", "127.0.0.1", "::1"),  # A proxy cannot reach services on this machine.
        )  # fmt: skip

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def service(self, name: str) -> tuple[Service, Any]:
        """Returns the list of a service's replicas, and its JSON.

        Raises:
            httpx.HTTPError: the API does not answer, or answers with an error.
            InvalidList: a field is invalid.
        """
        body = await self._get(name, "endpoints")
        return parse_service(name, body), body

    async def certificate(self, name: str) -> tuple[str, str]:
        """Returns the name of a service's certificate, and the PEM text with its private key.

        Raises:
            httpx.HTTPError: see `service`.
            InvalidList: a field is missing.
        """
        body = await self._get(name, "certificate")
        return certificate_in(name, body)

    async def _get(self, name: str, what: str) -> Any:
        answer = await self._http.get(f"/v1/services/{name}/{what}")
        if not answer.is_success:
            words = f"the API answers {answer.status_code}: {_problem_in(answer)}"
            raise httpx.HTTPStatusError(words, request=answer.request, response=answer)
        try:
            return answer.json()
        except ValueError:
            raise httpx.DecodingError("the answer is not JSON", request=answer.request) from None

    async def report(
        self, name: str, balancer: str, seconds: Iterable[Second], now: Mapping[str, Any] | None = None
    ) -> str | None:
        """Sends counts, and the balancer's current state `now`.

        The API keeps the first counts of each second and balancer, so a repeated report is harmless.

        Returns why the API refuses these counts, which another try would not change; None: it has accepted them.

        Raises:
            httpx.HTTPError: the counts should be sent again.
        """
        body = {"balancer": balancer, "seconds": [one.to_json() for one in seconds], "now": now}
        answer = await self._http.post(f"/v1/services/{name}/requests", json=body)
        if answer.status_code in _INVALID:
            return f"{answer.status_code} {answer.text[:500]}"
        answer.raise_for_status()
        return None

    async def follow(self, connected: Callable[[], None], changed: Callable[[str], None]) -> None:
        """Follows the event stream until it is cancelled, across lost connections.

        Args:
            connected: called whenever the stream has begun, because changes before it may have been missed.
            changed: called with the name, and with the id, of a service whose list has changed.
        """
        after, tries = "now", 0
        while True:
            try:
                timeout = httpx.Timeout(_ANSWER_S, read=_SILENCE_S)
                parameters = {"follow": "true", "after": after}
                headers = {"accept": "text/event-stream"}
                async with self._http.stream(
                    "GET", "/v1/events", params=parameters, headers=headers, timeout=timeout
                ) as answer:
                    if answer.status_code in (400, 410):
                        after = "now"  # The position is unknown, for example after the database was restored.
                    answer.raise_for_status()
                    connected()
                    async for position, kind, detail in _events(_lines(answer)):
                        after, tries = position or after, 0
                        if kind == EVENT:  # The option --service is either the name or the id.
                            changed(str(detail.get("name")))
                            changed(str(detail.get("service")))
            except httpx.HTTPError as error:
                if not tries:
                    _log.warning("the API's event stream is lost: %s", error or type(error).__name__)
            longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**tries)
            tries = min(tries + 1, 10)
            await asyncio.sleep(random.uniform(longest_s / 2, longest_s))


def _problem_in(answer: httpx.Response) -> str:
    """Returns the API's sentence in an answer with an error, or the beginning of its text."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    known = body if isinstance(body, dict) else {}
    return str(known.get("detail") or known.get("title") or answer.text[:200])


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    # Not `aiter_lines`, which also splits at other line separators. They may be in the text of an event.
    rest = b""
    async for chunk in answer.aiter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace")


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, str, dict[str, Any]]]:
    """Yields position, kind and detail of each server-sent event. An event with another form is ignored."""
    position, data = "", ""
    async for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            position = value
        elif name == "data":
            data += value
        elif not line and data:
            try:
                body = json.loads(data)
            except ValueError:
                body = None
            if isinstance(body, dict) and isinstance(detail := body.get("detail"), dict):
                yield position, str(body.get("kind")), detail
            data = ""
