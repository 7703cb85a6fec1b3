"""Spot prices: the newest entry of EC2's price history for each instance type and zone, refreshed at intervals."""

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from capacity.provider import ProviderUnavailable
from capacity.providers.ec2.errors import asking
from capacity.providers.ec2.settings import Ec2Settings

_log = logging.getLogger(__name__)
_KEPT = timedelta(days=90)
"""The length of EC2's price history. Older entries are ignored."""


class SpotPrices:
    """The spot prices of one region. Thread-safe."""

    def __init__(
        self, name: str, settings: Ec2Settings, client: Any, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._settings, self._client = name, settings, client
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_s: float | None = None
        self._found: dict[tuple[str, str], float] = {}

    def of(self, machine_type: str, zone: str) -> float:
        """Returns the spot price in US dollars an hour, or the price of the settings if EC2 has none.

        Raises:
            ProviderUnavailable: EC2 does not answer, and prices were never fetched before.
        """
        with self._lock:
            if self._asked_s is None or self._clock() - self._asked_s >= self._settings.prices_s:
                try:
                    self._found = self._newest()
                except ProviderUnavailable as error:
                    if self._asked_s is None:
                        raise
                    _log.warning("%s; keeping the previous prices", error)
                self._asked_s = self._clock()
            found = self._found.get((machine_type, zone))
        said = self._settings.machine_types[machine_type]
        default = said.usd_per_h if said.spot_usd_per_h is None else said.spot_usd_per_h
        return default if found is None else found

    def _newest(self) -> dict[tuple[str, str], float]:
        now = datetime.now(UTC)
        newest: dict[tuple[str, str], tuple[datetime, float]] = {}
        with asking(self._name, "reading spot prices"):
            pages = self._client.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=sorted(self._settings.machine_types),
                ProductDescriptions=["Linux/UNIX"],
                Filters=[{"Name": "availability-zone", "Values": sorted(self._settings.zones)}],
                StartTime=now,
            )
            for page in pages:
                for one in page["SpotPriceHistory"]:
                    key, at = (one["InstanceType"], one["AvailabilityZone"]), one["Timestamp"]
                    if now - at < _KEPT and (key not in newest or at > newest[key][0]):
                        newest[key] = (at, float(one["SpotPrice"]))
        return {key: price for key, (_, price) in newest.items()}
