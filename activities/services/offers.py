"""The offers of all providers, as services see them."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from capacity.offers import Offer
from capacity.provider import Provider, ProviderUnavailable

_log = logging.getLogger(__name__)
_KEPT_S = 60.0
"""Offers are read again after this time. Prices change more slowly."""
_RETRY_S = 5.0
"""While a provider has not answered yet, all are asked again after this time."""


class Offers:
    """Reads the providers' offers, and keeps them for a while. May be used by several threads."""

    def __init__(self, providers: Mapping[str, Provider], clock: Callable[[], float] = time.monotonic) -> None:
        self._providers = providers
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, Sequence[Offer]] = {}
        self._read_at_s: float | None = None

    def read(self) -> list[Offer] | None:
        """Returns the offers of all providers; None: a provider has not answered yet.

        For a provider that does not answer now, the last known offers are used.
        """
        if self._lock.acquire(blocking=not self._is_complete()):
            try:
                self._refresh()
            finally:
                self._lock.release()
        # Otherwise another thread reads the offers, perhaps from a provider that hangs: the known ones are good enough.
        if not self._is_complete():
            return None
        return [offer for name in self._providers for offer in self._known[name]]

    def _is_complete(self) -> bool:
        return len(self._known) == len(self._providers)

    def _refresh(self) -> None:
        now_s = self._clock()
        kept_s = _KEPT_S if self._is_complete() else _RETRY_S
        if self._read_at_s is not None and now_s - self._read_at_s < kept_s:
            return
        for name, provider in self._providers.items():
            try:
                self._known[name] = provider.offers()
            except ProviderUnavailable as error:
                _log.warning("provider %s: %s; its last known offers are used", name, error)
        self._read_at_s = self._clock()
