"""Where replicas stand in HAProxy's configuration, and which lists are refused."""

from typing import Any

import pytest

from proxies.balance.configuration import ProxyLimits, effective_policy, seats, server_line
from proxies.balance.values import InvalidList, RegionZone, parse_service

HERE = RegionZone("east", "a")


def entry(number: int, **fields: Any) -> dict[str, Any]:
    usual = {
        "replica": number, "address": f"10.0.0.{number}", "port": 8000, "region": "east", "zone": "a",
        "gpu_type": "a100", "kind": "spot", "state": "ready", "is_canary": False,
    }  # fmt: skip
    return {**usual, **fields}


def body(*endpoints: dict[str, Any], **fields: Any) -> dict[str, Any]:
    usual = {
        "service": "sv-1", "name": "chat", "policy": "round_robin", "sticky_header": None,
        "sticky_prefix_bytes": None, "resume": False, "retry_non_idempotent": False,
        "request_timeout_s": 30, "first_byte_s": None, "max_queue": 100, "hold_s": 0, "drain_s": 30, "version": 1,
        "canary": None, "certificate": None, "endpoints": list(endpoints),
    }  # fmt: skip
    return {**usual, **fields}


def test_only_ready_replicas_with_an_address_have_seats() -> None:
    """A replica that drains, or whose host has no address, gets no requests."""
    listed = body(
        entry(1), entry(2, state="draining"), entry(3, address="gone.example"), entry(4, address="v6.example")
    )
    found = seats(parse_service("chat", listed), {"10.0.0.1": "10.0.0.1", "v6.example": "fd00::4"}, None)
    assert [(seat.path, seat.address) for seat in found] == [
        ("hold/1-10.0.0.1:8000", "10.0.0.1:8000"),
        ("round_robin/1-10.0.0.1:8000", "10.0.0.1:8000"),
        ("hold/4-fd00::4:8000", "[fd00::4]:8000"),
        ("round_robin/4-fd00::4:8000", "[fd00::4]:8000"),
    ]


def test_least_load_makes_the_other_zones_a_reserve() -> None:
    """Each replica stands in both backends, as a backup in the one of the other zones; distance lowers the weight."""
    listed = body(entry(1), entry(2, zone="b"), entry(3, region="west", zone="a"), policy="least_load")
    service = parse_service("chat", listed)
    everywhere = seats(service, {f"10.0.0.{number}": f"10.0.0.{number}" for number in (1, 2, 3)}, HERE)
    found = [seat for seat in everywhere if seat.backend != "hold"]
    assert [(seat.backend, seat.name[0], seat.weight, seat.is_backup) for seat in found] == [
        ("near", "1", 100, False), ("far", "1", 100, True),
        ("near", "2", 100, True), ("far", "2", 100, False),
        ("near", "3", 25, True), ("far", "3", 25, False),
    ]  # fmt: skip
    assert " backup" in server_line(found[1], ProxyLimits(10, 7, 8, 1, 1.0))
    assert " backup" not in server_line(found[0], ProxyLimits(10, 7, 8, 1, 1.0))


def test_without_a_zone_least_load_counts_connections() -> None:
    """No replica is nearer than another if the zone of the clients is unknown."""
    service = parse_service("chat", body(entry(1), policy="least_load"))
    assert effective_policy(service, None) == "least_connections" and effective_policy(service, HERE) == "least_load"
    assert [seat.backend for seat in seats(service, {"10.0.0.1": "10.0.0.1"}, None)] == ["hold", "least_connections"]


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ([], "list of service chat: must be an object, it is []"),
        (body(name="other"), "name: must be 'chat', it is 'other'"),
        ({"service": "sv-1", "name": "chat"}, "endpoints: is missing; must be a list"),
        (body(policy="random"), "policy: must be one of round_robin, least_connections, least_load, it is 'random'"),
        (body(max_queue=True), "max_queue: must be a number from 0 to 1e+06, it is True"),
        (body(request_timeout_s=0), "request_timeout_s: must be a number from 0.001 to 86400, it is 0"),
        (body(entry(1), entry(2, port=0)), "endpoints[1]: port: must be a number from 1 to 65535, it is 0"),
        (body(entry(1, state="up")), "endpoints[0]: state: must be one of ready, draining, it is 'up'"),
        (body(entry(1, address="fe80::1%\n  x")), "address: must be an IP address or a host name"),
        (body(entry(1, address="a b")), "endpoints[0]: address: must be an IP address or a host name, it is 'a b'"),
    ],
)
def test_an_invalid_list_is_refused_by_field(listed: Any, said: str) -> None:
    with pytest.raises(InvalidList) as caught:
        parse_service("chat", listed)
    assert said in str(caught.value)
