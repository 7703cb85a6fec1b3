"""Which of several regions' plans for one workload wins the auction."""

from collections.abc import Iterable

from domain.scheduling import Plan


def best(plans: Iterable[Plan]) -> Plan | None:
    """The plan that comes first by `Plan.key`, which is a total order over the plans of different regions."""
    return min(plans, default=None, key=lambda plan: plan.key)
