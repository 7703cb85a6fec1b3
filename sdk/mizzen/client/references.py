"""Resolves a reference to a workload: an id, the start of an id, or a name."""

import re
from typing import TYPE_CHECKING

from mizzen.client.errors import AmbiguousReference, UnknownReference
from mizzen.client.views import TERMINAL_PHASES, Workload

if TYPE_CHECKING:
    from mizzen.client.client import Client

_ID = re.compile(r"wl-[0-9a-z]{16}")
_LISTED = 10


def resolve(client: "Client", reference: str) -> str:
    """Return the id of the workload to which `reference` refers.

    A reference is an id, a name, or the start of an id (wl-...). If live workloads have the name, those that have ended
    are ignored.

    Raises:
        UnknownReference: the reference matches no workload.
        AmbiguousReference: the reference matches several workloads. The message lists them.
    """
    if _ID.fullmatch(reference):
        return reference
    named = list(client.workloads(name=reference))
    found = [workload for workload in named if workload["phase"] not in TERMINAL_PHASES] or named
    if not found and reference.startswith("wl-"):
        found = [workload for workload in client.workloads() if workload["id"].startswith(reference)]
    if not found:
        raise UnknownReference(f"there is no workload {reference!r}: give an id, the start of one (wl-...) or a name")
    if len(found) > 1:
        raise AmbiguousReference(f"{reference!r} matches {len(found)} workloads: {_listed(found)}")
    return found[0]["id"]


def _listed(found: list[Workload]) -> str:
    texts = [f"{w['id']} ({w['name']}, {w['phase']})" for w in found[:_LISTED]]
    return ", ".join([*texts, "..."] if len(found) > _LISTED else texts)
