"""Fair shares: a tenant's part of the credit (MAST expression 11). Age's part (10) is in the walk, `gms.kernels`."""

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


def fair_credit(weights: CreditWeights, window_share: float, average: float) -> float:
    """Credit for a tenant that used less than others (expression 11), negative if it used more.

    0 where nobody with a quota used anything (`average` is 0).
    """
    return 0.0 if average == 0 else weights.w_fair * (1 - window_share / average)
