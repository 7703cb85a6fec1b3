"""Updates of a service to a new version: which replicas get a successor now, and when an update is given up."""

from collections.abc import Mapping, Sequence

from services.values import ReplicaFacts, Stage

FAILURES_IN_A_ROW = 3
"""An update is given up after this many failed replicas of the new version, if none of them has been ready."""


def is_halted(newest: int, version: int, failures: int, good_version: int) -> bool:
    """Returns whether a failure gives up the update: an older version works, and the newest one never did.

    Args:
        newest: the version of the update.
        version: the version of the replica that failed.
        failures: the number of failed replicas in a row, with this one.
        good_version: the newest version of which a replica has been ready; 0: none.
    """
    return version == newest and 0 < good_version < newest and failures >= FAILURES_IN_A_ROW


def successions(
    newest: int, replicas: Sequence[ReplicaFacts], pairs: Mapping[int, ReplicaFacts], surge: int
) -> list[ReplicaFacts]:
    """Returns the replicas of older versions whose successors are launched now.

    Args:
        newest: the version of the update.
        replicas: the replicas of the service, without those that are leaving or draining.
        pairs: the existing successors, by their predecessor's number.
        surge: the largest number of successors that may exist beside their predecessors.

    Returns:
        First the replicas that have never been ready, then those whose probe fails, then the others. Within each group,
        the oldest comes first.
    """
    old = [one for one in replicas if one.version != newest and one.number not in pairs]
    old.sort(key=lambda one: (one.was_ready, one.stage is Stage.READY, one.number))
    return old[: max(0, surge - len(pairs))]
