"""The bandwidth that this process may use on each link between two regions, divided among its kinds of copies."""

import threading

from domain.protocol.data import NIGHTLY, ON_DEMAND
from infra.config.data import CopySettings
from infra.copies.bandwidth import Bandwidth, BandwidthShare

_links: dict[tuple[str, str, CopySettings], dict[str, BandwidthShare]] = {}
_lock = threading.Lock()


def share(settings: CopySettings, source: str, target: str, name: str) -> BandwidthShare | None:
    """Returns the share `name` of this process's bandwidth on the link between two regions; None: it is not limited."""
    if settings.link_bytes_per_s is None:
        return None
    with _lock:
        shares = _links.get((source, target, settings))
        if shares is None:
            bandwidth = Bandwidth(settings.link_bytes_per_s)
            fractions = {NIGHTLY: settings.nightly_fraction, ON_DEMAND: 1 - settings.nightly_fraction}
            shares = {kind: bandwidth.share(kind, fraction) for kind, fraction in fractions.items()}
            _links[source, target, settings] = shares
    return shares[name]
