"""How much of each link between two regions this process may use, and who of its copies gets how much of that."""

import threading

from domain.protocol import NIGHTLY, ON_DEMAND
from infra.config import CopySettings
from mizzen.objects.bandwidth import Bandwidth, Share

_links: dict[tuple[str, str, CopySettings], dict[str, Share]] = {}
_lock = threading.Lock()


def share(settings: CopySettings, source: str, target: str, name: str) -> Share | None:
    """The share `name` of what this process may use of a link between regions; None: as much as there is."""
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
