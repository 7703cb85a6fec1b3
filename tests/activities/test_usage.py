"""Incremental use over a moving window equals the sum over the whole history."""

import random

import pytest

from activities.scheduling.usage import Usage

WINDOW_US = 1000


@pytest.mark.parametrize("seed", range(20))
def test_use_is_what_all_of_history_sums_up_to(seed: int) -> None:
    """However attempts begin, end, are corrected or are reported late, shares equal the plain sum exactly."""
    chance = random.Random(seed)
    usage, now_us, fleet = Usage(WINDOW_US), 0, (7, 3000)
    live: list[tuple[str, int, tuple[int, int]]] = []
    history: list[tuple[str, int, int, tuple[int, int]]] = []
    for _ in range(300):
        now_us += chance.choice([0, 1, 10, 300])
        match chance.randrange(4):
            case 0 | 1:
                began = now_us - chance.choice([-50, 0, 0, 5, 900, 3000])
                live.append((chance.choice("abc"), began, (chance.randrange(4), chance.randrange(900))))
                usage.began(*live[-1])
            case 2 if live:
                tenant, began, holds = live.pop(chance.randrange(len(live)))
                ended = max(began, now_us - chance.choice([0, 0, 20]))
                usage.ended(tenant, ended, holds)
                history.append((tenant, began, ended, holds))
            case 3 if live:  # The attempt is removed, as if it had never begun.
                tenant, began, holds = live.pop(chance.randrange(len(live)))
                usage.ended(tenant, began, holds)
        whole = history + [(tenant, began, max(began, now_us), holds) for tenant, began, holds in live]
        assert usage.shares(now_us, fleet, "abcd") == {
            tenant: _share(whole, tenant, now_us, fleet) for tenant in "abcd"
        }


def _share(
    whole: list[tuple[str, int, int, tuple[int, int]]], tenant: str, now_us: int, fleet: tuple[int, int]
) -> float:
    used = [0, 0]
    for name, began, ended, holds in whole:
        held_us = min(ended, now_us) - max(began, now_us - WINDOW_US)
        if name == tenant and held_us > 0:
            used = [u + held_us * amount for u, amount in zip(used, holds, strict=True)]
    return max(u / (WINDOW_US * has) for u, has in zip(used, fleet, strict=True))


def test_a_fleet_without_something_has_no_share_of_it() -> None:
    """Without GPUs only CPUs count; without machines every share is 0."""
    usage = Usage(WINDOW_US)
    usage.began("a", 0, (4, 500))
    assert usage.shares(1000, (0, 1000), "a") == {"a": 0.5}
    assert usage.shares(1000, (0, 0), "a") == {"a": 0.0}
