"""The fair-share term of the credit (MAST expression 11). `gms.kernels` computes the age term (expression 10)."""

from collections.abc import Iterable
from math import fsum

from domain.scheduling import CreditWeights, TenantState


def has_quota(tenant: TenantState) -> bool:
    """Returns whether the tenant has any quota: some GPUs, some CPUs, or unlimited CPUs."""
    cpus = tenant.quota_cpus_milli
    return cpus is None or cpus > 0 or any(slots > 0 for slots in tenant.quota_gpus.values())


def average_share(tenants: Iterable[TenantState]) -> float:
    """Returns the mean windowed share (a fraction of the fleet) of the tenants that have a quota; 0 if there are none.

    The sum is rounded only once (`fsum`), so the order of the tenants does not matter.
    """
    shares = [tenant.window_share for tenant in tenants if has_quota(tenant)]
    return fsum(shares) / len(shares) if shares else 0.0


def fair_credit(weights: CreditWeights, window_share: float, average: float) -> float:
    """Returns the fair-share credit (expression 11): positive below the average share, negative above it.

    If no tenant with a quota used anything (`average` is 0), the credit is 0.
    """
    return 0.0 if average == 0 else weights.w_fair * (1 - window_share / average)
