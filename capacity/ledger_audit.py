"""Compares the ledger with a provider's list of machines: finds stray, duplicate and missing machines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from capacity.provider import FoundMachine


@dataclass(frozen=True)
class LedgerEntry:
    """A live instance of one provider in the ledger."""

    native_id: str | None
    """The provider's id of the machine; None: no launch is recorded, but one may be in progress."""
    launched_at_s: float | None
    """Seconds since the epoch."""


@dataclass(frozen=True)
class LedgerDifferences:
    """The differences between the ledger and a provider's list."""

    strays: dict[str, str] = field(default_factory=dict)
    """Machines that no live instance owns: maps the provider's id to the instance for which it was launched."""
    seconds: dict[str, str] = field(default_factory=dict)
    """Duplicates: maps the provider's id to the live instance, for which the ledger records another machine."""
    ended: dict[str, str] = field(default_factory=dict)
    """Instances whose machine has ended, with the provider's reason. They are handled at once."""
    missing: list[str] = field(default_factory=list)
    """Instances that were launched and are not in the provider's list."""


def compare(
    entries: Mapping[str, LedgerEntry], found: Sequence[FoundMachine], now_s: float, lists_late_s: float
) -> LedgerDifferences:
    """Returns the differences between the ledger and a provider's list.

    The list must be fetched before the ledger is read: each machine in the list was in the ledger before its launch. A
    difference is confirmed only when the next comparison finds it again, because providers' lists lag.

    Args:
        entries: all live instances of the provider, by id.
        found: the provider's list.
        now_s: the time when the list was requested, in seconds since the epoch.
        lists_late_s: the time after its launch for which a machine may be missing from the list.
    """
    out = LedgerDifferences()
    there = {machine.native_id for machine in found}
    for machine in found:
        entry = entries.get(machine.instance)
        if machine.ended is not None:
            if entry is not None and entry.native_id == machine.native_id:
                out.ended[machine.instance] = machine.ended
        elif entry is None:
            out.strays[machine.native_id] = machine.instance
        elif entry.native_id is not None and entry.native_id != machine.native_id:
            out.seconds[machine.native_id] = machine.instance
    for instance, entry in entries.items():
        launched_s = entry.launched_at_s
        if entry.native_id is None or entry.native_id in there or launched_s is None:
            continue
        if now_s - launched_s > lists_late_s:
            out.missing.append(instance)
    return out
