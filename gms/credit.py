"""Credit: who goes first among workloads of the same rank (MAST expressions 10 and 11)."""

from collections.abc import Iterable
from math import fsum

from domain.scheduling import CreditWeights, TenantState


def has_quota(tenant: TenantState) -> bool:
    """Whether the tenant may use anything at all as within-quota: some GPUs, some CPUs, or CPUs without limit."""
    cpus = tenant.quota_cpus_milli
    return cpus is None or cpus > 0 or any(slots > 0 for slots in tenant.quota_gpus.values())


def average_share(tenants: Iterable[TenantState]) -> float:
    """Mean windowed share (a fraction of the fleet) of the tenants that have a quota; 0 if there are none.

    The sum is exact before it is rounded once, so that the order of the tenants does not matter.
    """
    shares = [tenant.window_share for tenant in tenants if has_quota(tenant)]
    return fsum(shares) / len(shares) if shares else 0.0


def age_credit(weights: CreditWeights, age_s: float) -> float:
    """Credit for waiting (expression 10): grows with age up to the cap. An age below 0 s counts as 0 s."""
    return weights.w_age * min(max(age_s, 0.0), weights.age_cap_s)


def fair_credit(weights: CreditWeights, window_share: float, average: float) -> float:
    """Credit for a tenant that used less than others (expression 11), negative if it used more.

    0 where nobody with a quota used anything (`average` is 0).
    """
    return 0.0 if average == 0 else weights.w_fair * (1 - window_share / average)
