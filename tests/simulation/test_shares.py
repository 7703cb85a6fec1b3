"""The shares of a simulation equal plain sums over its history."""

import random
from collections.abc import Mapping

import pytest

from domain.scheduling import TenantState
from gms.contested_use import share_of_quota
from reference.window_use import used
from simulation.shares import Shares

FLEET = 64, 640_000
WINDOW_S = 1000
TENANTS = {name: TenantState(name, 3, {"a100": quota}, None, 0.0) for name, quota in (("a", 4), ("b", 96), ("c", 8))}


@pytest.mark.parametrize("seed", range(10))
def test_shares_equal_plain_sums(seed: int) -> None:
    """Contested use over the window, relative to quota. The window may begin at the sample before it."""
    chance, now_s = random.Random(seed), 0
    shares = Shares(TENANTS, *FLEET, WINDOW_S)
    uses: list[tuple[str, int, int, tuple[int, int]]] = []
    held = [(name, 0, (0, 0)) for name in TENANTS]
    marks: list[tuple[int, str]] = []
    sampled: list[int] = []
    for _ in range(60):
        now_s += chance.choice([0, 1, 30, 200])
        name = chance.choice("abc")
        began = next(one for one in held if one[0] == name)
        held.remove(began)
        uses.append((name, began[1], now_s, began[2]))
        held.append((name, now_s, (chance.randrange(9), chance.randrange(900))))
        shares.hold(
            now_s, name, chance.choice("xy"), *(new - old for new, old in zip(held[-1][2], began[2], strict=True))
        )
        marks.append((now_s, chance.choice(["", "a", "b", "ab", "c"])))
        shares.contested.mark(*marks[-1])
        found = {t.name: t.window_share for t in shares.tenants(now_s)}
        sampled.append(now_s)
        from_s = max((at_s for at_s in sampled if at_s <= now_s - WINDOW_S), default=None)
        whole = uses + [(owner, at_s, now_s, amounts) for owner, at_s, amounts in held]
        assert found == pytest.approx(_plain(whole, from_s, now_s, marks))


def _plain(
    whole: list[tuple[str, int, int, tuple[int, int]]], from_s: int | None, now_s: int, marks: list[tuple[int, str]]
) -> Mapping[str, float]:
    span_s, out = WINDOW_S if from_s is None else now_s - from_s, {}
    for name, tenant in TENANTS.items():
        gpu_s, cpu_milli_s = used(whole, name, from_s or 0, now_s, marks)
        out[name] = share_of_quota(tenant, (gpu_s / span_s, cpu_milli_s / span_s), FLEET)
    return out


@pytest.mark.parametrize("waits", ["", "large"])
def test_use_of_idle_gpus_costs_no_credit(waits: str) -> None:
    """50 hours of use far above the quota, while no other tenant waits, leave the share at 0."""
    tenants = {
        "large": TenantState("large", 3, {"a100": 96}, None, 0.0),
        "small": TenantState("small", 3, {"a100": 4}, None, 0.0),
    }
    shares = Shares(tenants, 128, 0, 86_400.0)
    shares.contested.mark(0.0, [waits] if waits else [])
    shares.hold(0.0, "large", "", 128, 0)
    shares.hold(3600.0, "small", "", 4, 0)
    shares.hold(3660.0, "small", "", -4, 0)
    assert {t.name: t.window_share for t in shares.tenants(50 * 3600.0)} == {
        "large": 0.0, "small": pytest.approx(60 / 86_400 if waits else 0.0),
    }  # fmt: skip
