"""Resolves a reference to a workload: an id, the start of an id, or a name."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from mizzen_client.errors import AmbiguousReference, UnknownReference
from mizzen_client.views import Workload

if TYPE_CHECKING:
    from mizzen_client.client import Client

_ID = re.compile(r"wl-[0-9a-z]{16}(-[0-9]{1,9})?")
_ELEMENT = re.compile(r"(.+)/([0-9]{1,9})")
_LISTED = 10


def resolve(
    client: "Client", reference: str, choose: Callable[[list[Workload]], Workload | None] = lambda found: None
) -> str:
    """Return the id of the workload to which `reference` refers, for an action that changes the workload.

    A reference is an id, a name, or the start of an id (wl-...). If live workloads have the name, those that have ended
    are ignored. `REFERENCE/INDEX` is an element of an array.

    Args:
        client: the client of the API.
        reference: the reference.
        choose: chooses one of several workloads with the name, which are listed newest first; None: none of them.

    Raises:
        UnknownReference: the reference matches no workload.
        AmbiguousReference: the reference matches several workloads, and none was chosen. The message lists them.
    """
    if _ID.fullmatch(reference):
        return reference
    if (element := _ELEMENT.fullmatch(reference)) is not None:
        return f"{resolve(client, element[1], choose)}-{int(element[2])}"
    found = list(client.workloads(name=reference, phases=("live",))) or list(client.workloads(name=reference))
    if not found:
        return _by_start(client, reference)
    chosen = found[0] if len(found) == 1 else choose(found)
    if chosen is None:
        raise _ambiguous(reference, found)
    return chosen["id"]


def resolve_newest(client: "Client", reference: str, note: Callable[[Workload], object] = lambda newest: None) -> str:
    """Return the id of the workload to which `reference` refers, for reading. Of several with a name it is the newest.

    The newest workload is the one that was submitted last, whether it is live or has ended. `note` is called with it if
    there are several. References are those of `resolve`.

    Raises:
        UnknownReference: the reference matches no workload.
        AmbiguousReference: the reference is the start of several ids. The message lists them.
    """
    if _ID.fullmatch(reference):
        return reference
    if (element := _ELEMENT.fullmatch(reference)) is not None:
        return f"{resolve_newest(client, element[1], note)}-{int(element[2])}"
    found = list(client.workloads(name=reference, limit=2))  # Newest first.
    if not found:
        return _by_start(client, reference)
    if len(found) > 1:
        note(found[0])
    return found[0]["id"]


def _by_start(client: "Client", reference: str) -> str:
    found = []
    if reference.startswith("wl-"):
        found = [workload for workload in client.workloads() if workload["id"].startswith(reference)]
    if not found:
        raise UnknownReference(f"there is no workload {reference!r}: give an id, the start of one (wl-...) or a name")
    if len(found) > 1:
        raise _ambiguous(reference, found)
    return found[0]["id"]


def _ambiguous(reference: str, found: list[Workload]) -> AmbiguousReference:
    return AmbiguousReference(f"{reference!r} matches {len(found)} workloads: {listed(found)}; give an id")


def listed(found: list[Workload]) -> str:
    """Return a list of workloads for a message, with their phases."""
    texts = [f"{w['id']} ({w['name']}, {w['phase']})" for w in found[:_LISTED]]
    return ", ".join([*texts, "..."] if len(found) > _LISTED else texts)
