"""Dynamic Fallback: how many spot and on-demand replicas a service should have (SkyServe, section 3.2)."""


def spot_wanted(target: int, extra: int, base: int = 0) -> int:
    """Returns how many spot replicas to keep launched: N_tar + N_extra, less the base of on-demand replicas.

    Args:
        target: N_tar, the number of replicas that should be ready.
        extra: N_extra, the number of spot replicas beyond the target.
        base: the number of on-demand replicas that are always kept. If the base covers the target, the result is 0.
    """
    rest = max(0, target - base)
    return rest + extra if rest else 0


def on_demand_wanted(target: int, extra: int, ready_spot: int, base: int = 0) -> int:
    """Returns O(t) = min(N_tar, N_tar + N_extra - S_r(t)), the number of on-demand replicas to keep launched.

    With a base, the formula applies to the target without the base, and the base is added. The result is from
    min(base, target) to the target, also if more spot replicas are ready than wanted.

    Args:
        target: N_tar, the number of replicas that should be ready.
        extra: N_extra, the number of spot replicas beyond the target.
        ready_spot: S_r(t), the number of spot replicas that are ready.
        base: the number of on-demand replicas that are always kept.
    """
    kept = min(base, target)
    rest = target - kept
    return kept + max(0, min(rest, rest + extra - ready_spot))
