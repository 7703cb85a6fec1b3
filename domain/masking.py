"""Masks the ids of workloads in text for readers that may not see those workloads."""

import re
from collections.abc import Collection

ID = re.compile(r"\bwl-[0-9a-z]{16}(?:-[0-9]+)?\b")
_RUN = re.compile(rf"{ID.pattern}(?:, {ID.pattern})*")


def mask_ids(text: str, seen: Collection[str]) -> str:
    """Returns a text with the ids of workloads that are not in `seen` replaced by their number."""
    return _RUN.sub(lambda run: ", ".join(named(run.group().split(", "), seen)), text)


def named(ids: list[str], seen: Collection[str]) -> list[str]:
    """Returns the ids in `seen`, followed by a text with the number of the other ids."""
    own = [id_ for id_ in ids if id_ in seen]
    others = len(ids) - len(own)
    if others:
        own.append("a workload of another tenant" if others == 1 else f"{others} workloads of other tenants")
    return own
