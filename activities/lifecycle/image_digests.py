"""Finds out which image a tag names: its digest, which is kept, so that every attempt runs the same bits.

The workers of the control plane ask the registry, by the HTTP API of the OCI distribution specification. The
registry's name comes from a document of a user, which must not make workers send requests into their own network.
Therefore they ask only registries at public addresses and the registries in `tasks.registries`.
"""

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
from temporalio.exceptions import ApplicationError

from domain.blame import LaunchError
from domain.egress import refusal
from domain.images import ImageReference, parse_image
from domain.spec import WorkloadSpec

_KINDS = (
    "application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json",
)  # fmt: skip
_HOSTS = {"docker.io": "registry-1.docker.io"}
_TIMEOUT_S = 8.0
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


def images_of(spec: WorkloadSpec) -> Iterator[tuple[str, str | None]]:
    """Yields the image of each job that has one, with the name of the secret for its registry."""
    for job in spec.jobs:
        if job.image is not None:
            yield job.image, job.image_pull_secret


def pinned(
    spec: WorkloadSpec, known: Mapping[str, str], logins: Mapping[str, str], registries: Sequence[str]
) -> dict[str, str]:
    """Returns the references with digest of the images of a workload, by the references in its document.

    Those in `known` are used again. An image that the registry does not have is left out: agents then fail to fetch it,
    which ends the workload. Takes some seconds if a registry is slow.

    Args:
        spec: the document.
        known: those of earlier attempts.
        logins: values of the secrets that the jobs name, `USER:PASSWORD`.
        registries: `tasks.registries`.

    Raises:
        ApplicationError: `ImageUnavailable`: a registry does not answer, refuses the login, or may not be used.
    """
    found = dict[str, str]()
    for text, secret in images_of(spec):
        if text in found:
            continue
        image = parse_image(text)
        try:
            if text in known:
                found[text] = known[text]
                continue
            if image.digest is not None:
                with suppress(socket.gaierror):  # The name need only be known to the machines.
                    _base(image, registries)
                found[text] = image.pinned(image.digest)
                continue
            base = _base(image, registries)
            if (digest := _digest(base, image, logins.get(secret or ""), registries)) is not None:
                found[text] = image.pinned(digest)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, _Refused) as error:
            message = f"image {text}: {error or type(error).__name__}"
            raise ApplicationError(message, type=LaunchError.IMAGE_UNAVAILABLE) from None
    return found


class _Refused(Exception):
    """The registry may not be asked, or refuses."""


def _digest(base: str, image: ImageReference, login: str | None, registries: Sequence[str]) -> str | None:
    """Asks a registry for the digest of an image; None: it has no such image."""
    url = f"{base}/v2/{image.repository}/manifests/{image.tag}"
    headers = {"Accept": ", ".join(_KINDS)}
    user, _, password = (login or "").partition(":")
    basic = httpx.BasicAuth(user, password) if login else None
    with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False, trust_env=True) as client:
        answer = client.head(url, headers=headers)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            kind, _, rest = answer.headers.get("www-authenticate", "").partition(" ")
            if kind.lower() == "bearer":
                token = _token(client, dict(_PARAMETER.findall(rest)), image, basic, base, registries)
                answer = client.head(url, headers={**headers, "Authorization": f"Bearer {token}"})
            elif basic is not None:
                answer = client.head(url, headers=headers, auth=basic)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            needs = "the login in image_pull_secret" if login else "a request without image_pull_secret"
            raise _Refused(f"the registry {image.registry} refuses {needs}")
        digest = answer.headers.get("docker-content-digest", "")
        if not answer.is_success or _DIGEST.fullmatch(digest) is None:
            raise _Refused(f"the registry {image.registry} answered with status {answer.status_code}")
        return str(digest)


def _token(
    client: httpx.Client,
    told: Mapping[str, str],
    image: ImageReference,
    basic: httpx.BasicAuth | None,
    base: str,
    registries: Sequence[str],
) -> str:
    realm = told.get("realm", "")
    parts = urlsplit(realm)
    if f"{parts.scheme}://{parts.netloc}" != base:
        if parts.scheme != "https" or parts.hostname is None:
            raise _Refused(f"the registry {image.registry} names the login realm {realm!r}; it must be an https URL")
        _check_address(parts.netloc, parts.hostname, parts.port or 443, registries)
    query = {
        "scope": f"repository:{image.repository}:pull",
        **({"service": told["service"]} if "service" in told else {}),
    }
    answer = client.get(realm, params=query, auth=basic)
    if not answer.is_success:
        raise _Refused(f"the registry {image.registry} refuses the login (status {answer.status_code})")
    body: dict[str, Any] = answer.json()
    return str(body.get("token") or body.get("access_token") or "")


def _base(image: ImageReference, registries: Sequence[str]) -> str:
    """Returns the URL of an image's registry.

    Raises:
        _Refused: it may not be used.
        OSError: its name is unknown.
    """
    if f"http://{image.registry}" in registries:
        return f"http://{image.registry}"
    host = _HOSTS.get(image.registry, image.registry)
    parts = urlsplit(f"https://{host}")
    _check_address(image.registry, parts.hostname or "", parts.port or 443, registries)
    return f"https://{host}"


def _check_address(registry: str, host: str, port: int, registries: Sequence[str]) -> None:
    if registry in registries:
        return
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if refusal("https", str(address[0]), ()) is not None:
            raise _Refused(
                f"the registry {registry} is not at a public address; an operator can allow it with tasks.registries"
            )
