"""Incremental use over a moving window equals the sum over the whole history."""

import pickle
import random

import pytest

from activities.scheduling.queue_state import QueueState, microseconds
from activities.scheduling.usage import Usage
from domain.scheduling import TenantState
from gms.contested_use import ContestedTime, share_of_quota
from infra.config.scheduling import SchedulerSettings
from reference.window_use import used

WINDOW_US = 1000


@pytest.mark.parametrize("seed", range(20))
def test_use_is_what_all_of_history_sums_up_to(seed: int) -> None:
    """However attempts begin, end, are corrected or are reported late, contested use equals the plain sum exactly."""
    chance = random.Random(seed)
    contested, now_us = ContestedTime(), 0
    usage = Usage(WINDOW_US, contested.at)
    marks: list[tuple[int, str]] = []
    live: list[tuple[str, int, tuple[int, int]]] = []
    history: list[tuple[str, int, int, tuple[int, int]]] = []
    for _ in range(300):
        now_us += chance.choice([0, 1, 10, 300])
        match chance.randrange(6):
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
            case 4:
                marks.append((now_us, chance.choice(["", "", "a", "b", "ab", "d"])))
                contested.mark(*marks[-1])
        whole = history + [(tenant, began, max(began, now_us), holds) for tenant, began, holds in live]
        plain = {t: used(whole, t, now_us - WINDOW_US, now_us, marks) for t in "abcd"}
        assert usage.averages(now_us, "abcd") == {
            tenant: (gpus / WINDOW_US, cpus / WINDOW_US) for tenant, (gpus, cpus) in plain.items()
        }
        contested.forget(now_us - WINDOW_US)


def test_what_is_known_of_contested_times_does_not_grow() -> None:
    """Scans of a queue of two tenants that wait in turn: after ten windows, no more is stored than after two."""
    now_s, sizes = 1e6, []
    contested = ContestedTime()
    state = QueueState(SchedulerSettings(fair_window_s=1000.0), contested)
    state.put_tenants([TenantState(name, 3, {"a100": 4}, None, 0.0) for name in "ab"])
    for step in range(1000):
        contested.mark(microseconds(now_s), "" if step % 3 == 0 else "ab"[step % 2])
        state.scan(now_s)
        sizes.append(len(pickle.dumps(contested)))
        now_s += 10.0
    assert max(sizes[200:]) <= 1.1 * max(sizes[:200])


def test_shares_are_relative_to_the_quota() -> None:
    """Of GPUs or CPUs the larger share counts; without a quota, any use is a large share; a fleet has to have it."""
    small, large = TenantState("a", 3, {"a100": 4}, None, 0.0), TenantState("b", 3, {"a100": 90, "h100": 6}, 8000, 0.0)
    fleet = 100, 100_000
    assert share_of_quota(small, (2.0, 10_000.0), fleet) == 0.5
    assert share_of_quota(large, (2.0, 4000.0), fleet) == 0.5
    assert share_of_quota(large, (48.0, 2000.0), fleet) == 0.5
    assert share_of_quota(TenantState("c", 3, {}, 0, 0.0), (3.0, 500.0), fleet) == 3.0
    assert share_of_quota(large, (48.0, 4000.0), (0, 100_000)) == 0.5
    assert share_of_quota(large, (48.0, 4000.0), (0, 0)) == 0.0
