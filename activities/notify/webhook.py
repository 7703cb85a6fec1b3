"""Sends the signed request of a webhook, as the specification Standard Webhooks describes.

A user's document names the URL, so the server may answer with anything, slowly or not at all. The name is resolved
once, and the connection goes to the address that was checked.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from ipaddress import ip_address
from pathlib import Path
from socket import AI_ADDRCONFIG, SOCK_STREAM, gaierror, getaddrinfo

import httpx

from domain.egress import Network, refusal
from infra.errors import ConfigurationError

_PREFIX = "whsec_"
_MOST_KEYS = 10


class NotDelivered(Exception):
    """A try has failed. The text has nothing of a secret, of the path of a URL or of an answer."""


class Webhooks:
    """Sends requests with the settings of the installation."""

    def __init__(self, allowed: Sequence[Network], ca: Path | None, timeout_s: float, lookups: Executor) -> None:
        """`lookups` resolves names: a name server that does not answer must not delay anything else."""
        self._allowed, self._timeout_s, self._lookups = allowed, timeout_s, lookups
        self._tls = ssl.create_default_context()
        if ca is not None:
            try:
                self._tls.load_verify_locations(ca)
            except OSError as error:  # ssl.SSLError is one, too.
                raise ConfigurationError(f"notify.ca: {ca}: {error}; must be a PEM file of certificates") from None

    async def send(self, url: str, shown: str, id_: str, body: bytes, secret: str) -> None:
        """Sends a request and waits for the status of the answer. Redirects are not followed.

        Args:
            url: the URL, which may be a secret.
            shown: what errors say instead of it.
            id_: the id of the message.
            body: the body of the request.
            secret: the keys (`signed`).

        Raises:
            NotDelivered: the status is not 2xx, or there is no answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._post(url, shown, body, signed(id_, int(time.time()), body, secret))
        except TimeoutError:
            raise NotDelivered(f"no answer within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise NotDelivered(f"no answer: {_words(error)}") from None
        if 300 <= status < 400:
            raise NotDelivered(f"the answer is a redirect (status {status}), which is not followed")
        if not 200 <= status < 300:
            raise NotDelivered(f"the answer has the status {status}")

    async def _post(self, url: str, shown: str, body: bytes, headers: dict[str, str]) -> int:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise NotDelivered(f"{shown} is not a URL such as https://hooks.example.org/mizzen")
        address = await self._resolve(parsed, shown)
        target = parsed.copy_with(host=address)
        headers |= {"host": parsed.netloc.decode(), "content-type": "application/json", "user-agent": "mizzen"}
        named = {"sni_hostname": parsed.host}
        async with (
            httpx.AsyncClient(verify=self._tls, timeout=self._timeout_s, trust_env=False) as client,
            # The body of the answer is not read, whatever its size.
            client.stream("POST", target, content=body, headers=headers, extensions=named) as answer,
        ):
            return answer.status_code

    async def _resolve(self, url: httpx.URL, shown: str) -> str:
        """Returns the first address of a host to which requests may be sent.

        Raises:
            NotDelivered: the name is unknown, or there is no such address.
        """
        port = url.port or (443 if url.scheme == "https" else 80)
        flags = 0 if _is_address(url.host) else AI_ADDRCONFIG
        look = (url.host, port, 0, SOCK_STREAM, 0, flags)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._lookups, getaddrinfo, *look)
        except gaierror:
            raise NotDelivered(f"the host name in {shown} cannot be resolved") from None
        why: str | None = "it has no address"
        for *_, address in found:
            why = refusal(url.scheme, str(address[0]), self._allowed)
            if why is None:
                return str(address[0])
        raise NotDelivered(f"no request is sent to {shown}: {why}; an operator can allow it with notify.allow")


def signed(id_: str, at_s: int, body: bytes, secret: str) -> dict[str, str]:
    """Returns the headers that identify and sign a request.

    Args:
        id_: the id of the message.
        at_s: the time of the try, in seconds since the epoch.
        body: the body of the request.
        secret: keys, separated by white space; the request is signed with each, so that they can be rotated. A key is
            `whsec_` and base64, or a text.

    Raises:
        NotDelivered: it has no key, or too many.
    """
    keys = secret.split()
    if not 1 <= len(keys) <= _MOST_KEYS:
        raise NotDelivered(f"the secret has {len(keys)} keys; it must have 1 to {_MOST_KEYS}")
    content = b".".join((id_.encode(), str(at_s).encode(), body))
    signatures = (base64.b64encode(hmac.digest(_key(key), content, hashlib.sha256)).decode() for key in keys)
    return {
        "webhook-id": id_,
        "webhook-timestamp": str(at_s),
        "webhook-signature": " ".join(f"v1,{one}" for one in signatures),
    }


def _key(text: str) -> bytes:
    if not text.startswith(_PREFIX):
        return text.encode()
    try:
        return base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except ValueError:
        raise NotDelivered(f"a key in the secret begins with {_PREFIX} and is not base64 after it") from None


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _words(error: Exception) -> str:
    """Returns the message of a connection error. Of other errors, only the kind is certain to contain no secret."""
    cause = error.__cause__ or error
    is_known = isinstance(error, httpx.ConnectError) or isinstance(cause, OSError)
    said = re.sub(r"\s+", " ", str(error))[:200] if is_known else ""
    return said or type(error).__name__
