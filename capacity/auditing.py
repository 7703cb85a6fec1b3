"""Comparing the ledger with what a provider has: machines without an owner, second ones, and those that are missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from capacity.providers import Found


@dataclass(frozen=True)
class LedgerEntry:
    """A live instance of one provider in the ledger."""

    native_id: str | None
    """None: nothing is known of a launch; one may be under way."""
    launched_at_s: float | None
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Differences:
    """What is not as the ledger says."""

    strays: dict[str, str] = field(default_factory=dict)
    """Machines of the provider that no live instance owns, by its id: the instance that they were launched for."""
    seconds: dict[str, str] = field(default_factory=dict)
    """The same of those that were launched beside the one that the ledger knows."""
    missing: list[str] = field(default_factory=list)
    """Instances that the provider has launched and does not have."""


def compare(
    entries: Mapping[str, LedgerEntry], found: Sequence[Found], now_s: float, lists_late_s: float
) -> Differences:
    """What differs between the ledger and a provider's list.

    The list must be asked for before the ledger is read: whatever it names was in the ledger before it was launched.
    One look proves little, since providers list late; what is found again by the next one is so.

    Args:
        entries: all live instances of the provider, by id.
        found: its list.
        now_s: seconds since the epoch, when the list was asked for.
        lists_late_s: for how long after its launch a machine may be missing from the list.
    """
    out = Differences()
    for machine in found:
        entry = entries.get(machine.instance)
        if entry is None:
            out.strays[machine.native_id] = machine.instance
        elif entry.native_id is not None and entry.native_id != machine.native_id:
            out.seconds[machine.native_id] = machine.instance
    there = {machine.native_id for machine in found}
    for instance, entry in entries.items():
        launched_s = entry.launched_at_s
        if entry.native_id is None or entry.native_id in there or launched_s is None:
            continue
        if now_s - launched_s > lists_late_s:
            out.missing.append(instance)
    return out
