"""Use averaged over a time window, the input of the credit: of tenants (MAST expression 11) and of their people."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from domain.scheduling import TenantState
from gms.contested_use import ContestedTime, larger_share, share_of_quota

Amounts = tuple[float, float]
"""GPUs and thousandths of a core, or these times seconds."""


class _Uses:
    """The integrals over time of what names hold, and samples of them over the window."""

    def __init__(self, window_s: float, clock: Callable[[str, float], float]) -> None:
        """`clock(name, now_s)` returns the seconds up to `now_s` that count for a name, such as its contested time."""
        self._window_s, self._clock = window_s, clock
        self._holds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._used: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        """GPU-seconds and milli-core-seconds up to `_upto_s`, which is by the clock."""
        self._upto_s: dict[str, float] = {}
        self._samples: deque[tuple[float, dict[str, Amounts]]] = deque()

    def hold(self, now_s: float, name: str, gpus: int, cpus_milli: int) -> None:
        """Adds to what a name holds from `now_s` on; negative amounts are released."""
        self._integrate(now_s, name)
        self._holds[name][0] += gpus
        self._holds[name][1] += cpus_milli

    def _integrate(self, now_s: float, name: str) -> None:
        upto_s = self._clock(name, now_s)
        span_s = upto_s - self._upto_s.get(name, upto_s)
        for k in (0, 1):
            self._used[name][k] += self._holds[name][k] * span_s
        self._upto_s[name] = upto_s

    def averages(self, now_s: float) -> dict[str, Amounts]:
        """Returns the average use of each name that ever held anything. Each call takes a sample.

        The window begins at the newest sample that is at least the window's length old. If there is none yet, the time
        before the simulation counts as time without use.
        """
        for name in self._holds:
            self._integrate(now_s, name)
        self._samples.append((now_s, {name: (pair[0], pair[1]) for name, pair in self._used.items()}))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()
        from_s, before = self._samples[0]
        span_s = max(self._window_s, now_s - from_s)
        if now_s - from_s < self._window_s:
            before = {}
        out = {}
        for name, (gpus, cpus_milli) in self._used.items():
            earlier = before.get(name, (0.0, 0.0))
            out[name] = (gpus - earlier[0]) / span_s, (cpus_milli - earlier[1]) / span_s
        return out


class Shares:
    """The contested use of tenants, relative to quota, and the use of their people, relative to the fleet."""

    def __init__(self, tenants: Mapping[str, TenantState], gpus: int, cpus_milli: int, window_s: float) -> None:
        self._tenants = dict(tenants)
        self._fleet = gpus, cpus_milli
        self.contested = ContestedTime()
        self._uses = _Uses(window_s, self.contested.at)
        self._of_people = {tenant: _Uses(window_s, lambda _, now_s: now_s) for tenant in tenants}

    def hold(self, now_s: float, tenant: str, user: str, gpus: int, cpus_milli: int) -> None:
        """Adds to what a person holds for a tenant from `now_s` on; negative amounts are released."""
        self._uses.hold(now_s, tenant, gpus, cpus_milli)
        self._of_people[tenant].hold(now_s, user, gpus, cpus_milli)

    def tenants(self, now_s: float) -> Iterable[TenantState]:
        """Yields all tenants with their shares at `now_s`. Each call takes a sample (`_Uses.averages`)."""
        averages = self._uses.averages(now_s)
        self.contested.forget(now_s)
        for name, tenant in self._tenants.items():
            people = self._of_people[name].averages(now_s)
            yield replace(
                tenant,
                window_share=share_of_quota(tenant, averages.get(name, (0.0, 0.0)), self._fleet),
                user_shares={u: share for u, used in people.items() if (share := larger_share(used, self._fleet)) > 0},
            )
