"""Tenants' contested use averaged over a time window, the input of the credit's fair share (MAST expression 11)."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from domain.scheduling import TenantState
from gms.shares import ContestedTime, share_of_quota


class Shares:
    """The integral over contested time of what each tenant holds, and samples of it over the window."""

    def __init__(self, tenants: Mapping[str, TenantState], gpus: int, cpus_milli: int, window_s: float) -> None:
        self._tenants = dict(tenants)
        self._fleet = gpus, cpus_milli
        self._window_s = window_s
        self.contested = ContestedTime()
        self._holds = {tenant: [0, 0] for tenant in tenants}
        self._used = {tenant: [0.0, 0.0] for tenant in tenants}
        """GPU-seconds and milli-core-seconds up to `_since_s`."""
        self._since_s = {tenant: self.contested.at(tenant, 0.0) for tenant in tenants}
        """Contested time."""
        self._samples: deque[tuple[float, dict[str, tuple[float, float]]]] = deque()

    def hold(self, now_s: float, tenant: str, gpus: int, cpus_milli: int) -> None:
        """Adds to what a tenant holds from `now_s` on; negative amounts are released."""
        self._integrate(now_s, tenant)
        self._holds[tenant][0] += gpus
        self._holds[tenant][1] += cpus_milli

    def _integrate(self, now_s: float, tenant: str) -> None:
        contested_s = self.contested.at(tenant, now_s)
        span_s = contested_s - self._since_s[tenant]
        for k in (0, 1):
            self._used[tenant][k] += self._holds[tenant][k] * span_s
        self._since_s[tenant] = contested_s

    def tenants(self, now_s: float) -> Iterable[TenantState]:
        """Yields all tenants with their shares at `now_s`. Each call takes a sample.

        The window begins at the newest sample that is at least the window's length old. If there is none yet, the time
        before the simulation counts as time without use.
        """
        for name in self._tenants:
            self._integrate(now_s, name)
        used = {tenant: (pair[0], pair[1]) for tenant, pair in self._used.items()}
        self._samples.append((now_s, used))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()
        from_s, before = self._samples[0]
        span_s = max(self._window_s, now_s - from_s)
        for name, tenant in self._tenants.items():
            earlier = before[name] if now_s - from_s >= self._window_s else (0.0, 0.0)
            gpus, cpus_milli = ((used[name][k] - earlier[k]) / span_s for k in (0, 1))
            yield replace(tenant, window_share=share_of_quota(tenant, gpus, cpus_milli, self._fleet))
