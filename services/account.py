"""The record of a service over time: its availability, and what it would have cost on on-demand machines."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Account:
    """Sums since the service was created, up to `at_s`. Between two changes, all rates are constant."""

    at_s: float
    """Seconds since the epoch."""
    ready: int = 0
    """The number of ready replicas since `at_s`."""
    target: int = 0
    """N_tar since `at_s`."""
    on_demand_usd_per_h: float | None = None
    """The price of one on-demand replica since `at_s`; None: no provider offers one."""
    total_s: float = 0.0
    """The time with a target above 0: a service that is scaled to zero is neither available nor unavailable."""
    met_s: float = 0.0
    """The part of it with at least N_tar ready replicas (SkyServe, section 5: availability)."""
    on_demand_usd: float | None = 0.0
    """What N_tar on-demand replicas would have cost; None: there was a time without a price."""

    def advanced(self, now_s: float, ready: int, target: int, on_demand_usd_per_h: float | None) -> "Account":
        """Returns the record up to `now_s`, with the values that hold from then on."""
        span_s = max(0.0, now_s - self.at_s)
        price, usd = self.on_demand_usd_per_h, self.on_demand_usd
        if span_s > 0 and self.target > 0:
            usd = None if usd is None or price is None else usd + self.target * price * span_s / 3600
        return replace(
            self,
            at_s=max(now_s, self.at_s),
            ready=ready,
            target=target,
            on_demand_usd_per_h=on_demand_usd_per_h,
            total_s=self.total_s + (span_s if self.target > 0 else 0.0),
            met_s=self.met_s + (span_s if 0 < self.target <= self.ready else 0.0),
            on_demand_usd=usd,
        )

    @property
    def availability(self) -> float | None:
        """The fraction of the time with a target in which at least N_tar replicas were ready; None: there was none."""
        return self.met_s / self.total_s if self.total_s > 0 else None
