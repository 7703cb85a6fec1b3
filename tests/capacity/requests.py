"""Requests for instances that every provider understands."""

from capacity.offers import Offer
from capacity.pools import cluster_of
from capacity.provider import LaunchRequest
from domain.ids import new_instance_id


def request_for(offer: Offer, instance: str | None = None) -> LaunchRequest:
    """Returns a launch request for an offer."""
    instance = instance or new_instance_id()
    return LaunchRequest(
        instance, f"{offer.region}/{cluster_of('p', offer)}/{instance}", offer, "file:///b", "secret", "key"
    )
