"""The record of a service over time."""

import json
from dataclasses import asdict

from services.account import Account


def test_availability_and_cost() -> None:
    """Availability is the share of the time with enough replicas; the cost is that of N_tar on-demand replicas."""
    account = Account(100.0)
    assert account.availability is None
    account = account.advanced(110.0, 0, 2, 3.6)
    assert (account.availability, account.on_demand_usd) == (None, 0.0)  # Before the first decision, N_tar is 0.
    account = account.advanced(120.0, 2, 2, 3.6)
    account = account.advanced(150.0, 1, 2, 3.6)
    assert account.availability == 30 / 40
    account = account.advanced(150.0, 1, 1, 7.2)
    account = account.advanced(160.0, 1, 1, 7.2)
    assert account.availability == 40 / 50
    assert account.advanced(170.0, 0, 0, 7.2).advanced(990.0, 0, 0, 7.2).availability == 50 / 60, "no target, no time"
    assert account.on_demand_usd is not None and abs(account.on_demand_usd - (40 * 2 * 0.001 + 10 * 0.002)) < 1e-12
    assert Account(**json.loads(json.dumps(asdict(account)))) == account


def test_the_time_at_zero_counts_as_neither() -> None:
    """A service that is scaled to zero is not available, and nothing is missing."""
    account = Account(0.0).advanced(10.0, 0, 1, None).advanced(20.0, 1, 1, None).advanced(30.0, 0, 0, None)
    assert account.advanced(9000.0, 0, 0, None).availability == 10 / 20


def test_a_clock_that_goes_back_adds_nothing() -> None:
    """The clock of another worker may be behind."""
    account = Account(100.0).advanced(200.0, 1, 1, None)
    assert account.advanced(150.0, 1, 1, None) == account


def test_without_a_price_there_is_no_cost() -> None:
    """Once a time without a price is part of the record, the sum would be wrong."""
    account = Account(0.0).advanced(10.0, 1, 1, None).advanced(20.0, 1, 1, 3.0).advanced(30.0, 1, 1, 3.0)
    assert account.on_demand_usd is None
