"""The simulated cloud: its market rules, and its state in a folder."""

import json
import math
import threading
from pathlib import Path

import pytest

from capacity.providers.registry import check_providers, open_providers
from capacity.providers.trace.cloud import Cloud, CloudMachine
from capacity.providers.trace.market import Market, MarketInstance
from capacity.providers.trace.settings import TraceProviderSettings
from infra.config.settings import Settings
from infra.errors import ConfigurationError

TYPES = {"small": {"gpus": 4, "gpu_type": "a100", "usd_per_h": 4}}


def settings(**zone: object) -> TraceProviderSettings:
    """Returns settings of a cloud with one zone."""
    body = {"zones": {"za": {"region": "west", **zone}}, "machine_types": TYPES, "notice_s": 10, "start_median_s": 5}
    return TraceProviderSettings.model_validate(body)


def test_capacity_follows_the_trace_and_repeats() -> None:
    """A zone's capacity follows its trace and repeats it; `most` bounds it, and `speed` accelerates it."""
    market = Market(settings(counts=[3, 0, 9], gap_s=60, most=5), began_at_s=1000.0)
    assert [market.capacity("za", 1000.0 + at) for at in (0, 59, 60, 120, 180, 240)] == [3, 3, 0, 5, 3, 0]
    fast = settings(counts=[3, 0], gap_s=60).model_copy(update={"speed": 60.0})
    assert [Market(fast, 0.0).capacity("za", at) for at in (0, 1, 2)] == [3, 0, 3]
    assert Market(settings(counts=[3, 0], gap_s=60, times=4, most=10), 0.0).capacity("za", 0.0) == 10
    assert Market(settings(most=2), 0.0).capacity("za", 7.0) == 2
    assert Market(settings(most=2), 0.0).capacity("a zone that was removed", 7.0) == 0


def test_when_capacity_changes_next() -> None:
    """Capacity changes at the ends of intervals in the cloud's own time, and never without a trace."""
    market = Market(settings(counts=[3, 0, 9], gap_s=60), began_at_s=1000.0)
    assert [market.next_change_s(1000.0 + at) for at in (0, 59, 60)] == [1060.0, 1060.0, 1120.0]
    fast = settings(counts=[3, 0], gap_s=60).model_copy(update={"speed": 60.0})
    assert Market(fast, 0.0).next_change_s(0.5) == 1.0
    assert Market(settings(most=2), 0.0).next_change_s(7.0) == math.inf


def test_a_trace_file_is_read(tmp_path: Path) -> None:
    """A file in the format of the public spot traces is read."""
    path = tmp_path / "zone.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [1, 4]}))
    market = Market(settings(trace=str(path)), 0.0)
    assert [market.capacity("za", at) for at in (0, 299, 300)] == [1, 1, 4]


def test_the_cloud_takes_what_is_too_many_by_lot_with_notice() -> None:
    """Surplus machines are chosen at random but reproducibly, and get a notice; leaving machines use capacity."""
    market = Market(settings(counts=[3, 1], gap_s=60), 0.0)
    there = [MarketInstance(f"m{number}", f"t{number}", "za", 0.0, 5.0) for number in range(3)]
    assert market.taken(there, 59.0) == []
    taken = market.taken(there, 60.0)
    assert len(taken) == 2
    assert {one.ends_at_s for one in taken} == {70.0}
    assert market.taken(reversed(there), 60.0) == taken
    left = [one for one in there if one.native_id not in {t.native_id for t in taken}] + taken
    assert market.taken(left, 61.0) == []
    assert not market.has_room("za", left, 69.0)
    assert not market.has_room("za", left, 70.0)
    assert market.has_room("za", left[1:], 70.0)


def test_launches_take_their_time_by_token() -> None:
    """Launch times are log-normal around the median; a repeated launch takes the same time."""
    market = Market(settings(most=1), 0.0)
    drawn = sorted(market.start_s(f"t{number}") for number in range(999))
    assert market.start_s("t7") == market.start_s("t7")
    fast = Market(settings(most=1).model_copy(update={"speed": 4.0}), 0.0)
    assert fast.start_s("t7") == market.start_s("t7") / 4
    assert fast.noticed(MarketInstance("m", "t", "za", 0.0, 5.0), 20.0).ends_at_s == 22.5
    assert 4.5 < drawn[499] < 5.5
    assert drawn[0] > 1.0
    assert drawn[-1] < 25.0


def _machine(instance: MarketInstance, number: int) -> CloudMachine:
    return CloudMachine(instance, number, f"west/c/{instance.token}", "west", "small", {}, "file:///b", "secret", "key")


def test_one_token_is_one_machine_however_often_and_by_whomever(tmp_path: Path) -> None:
    """Twenty concurrent launches of five tokens in a zone of four give one machine for each token, at most four."""
    clouds = [Cloud(settings(most=4), tmp_path / "cloud") for _ in range(4)]
    got: dict[str, set[str | None]] = {}
    threads = []

    def launch(cloud: Cloud, token: str) -> None:
        machine = cloud.launch(token, "za", _machine)
        got.setdefault(token, set()).add(None if machine is None else machine.instance.native_id)

    for number in range(20):
        threads.append(threading.Thread(target=launch, args=(clouds[number % 4], f"t{number % 5}")))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = clouds[0].there()
    assert len(there) == 4
    assert sorted(one.number for one in there) == [0, 1, 2, 3]
    assert sorted(len(natives) for natives in got.values()) == [1] * 5
    assert [natives for natives in got.values() if None in natives] == [{None}]


def test_a_machine_starts_is_told_and_goes(tmp_path: Path) -> None:
    """A machine is first not started, then started, then has a notice file, and is then gone."""
    now = [0.0]
    settings_ = settings(counts=[1, 0], gap_s=60)
    cloud = Cloud(settings_, tmp_path / "cloud", clock=lambda: now[0])
    machine = cloud.launch("t", "za", _machine)
    assert machine is not None
    assert cloud.there() == [machine]
    assert cloud.started() == []
    now[0] = machine.instance.starts_at_s
    assert Cloud(settings_, tmp_path / "cloud", clock=lambda: now[0]).started() == [machine]
    now[0] = 60.0
    assert [one.instance.ends_at_s for one in cloud.there()] == [70.0]
    notice = json.loads(cloud.notice_file(machine.instance.native_id).read_text())
    assert notice == {"ends_at": 70.0, "words": "zone za has fewer machines"}
    now[0] = 70.0
    assert cloud.there() == []
    cloud.end(machine.instance.native_id)
    again = cloud.launch("t", "za", _machine)
    assert again is not None
    assert again.instance.ends_at_s == 70.0


def test_what_never_ends_is_written_as_json(tmp_path: Path) -> None:
    """A machine without an end is written as valid JSON, without infinity."""
    cloud = Cloud(settings(most=1), tmp_path)
    cloud.launch("t", "za", _machine)
    (path,) = (tmp_path / "machines").glob("*.json")
    assert "ends_at_s" not in json.loads(path.read_text(), parse_constant=pytest.fail)["instance"]
    assert math.isinf(cloud.there()[0].instance.ends_at_s)
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("said", "where", "says"),
    [
        ({"kind": "moon"}, "providers.p.kind", "must be one of ec2, kubernetes, slurm, trace; it is 'moon'"),
        ({}, "providers.p.kind", "it is None"),
        ({"kind": "static"}, "providers.p.kind", "must be one of"),
        ({"kind": "trace", "machine_types": TYPES}, "providers.p", "zones: is missing"),
        ({"kind": "trace", "machine_types": TYPES, "zones": {"za": {"region": "w"}}}, "zones.za", "set at least one"),
        (
            {
                "kind": "trace",
                "machine_types": {"m": {"gpus": 1, "usd_per_h": 1}},
                "zones": {"z": {"region": "w", "most": 1}},
            },
            "machine_types.m",
            "go together",
        ),
        (
            {"kind": "trace", "machine_types": TYPES, "zones": {"z": {"region": "w", "trace": "/no/such.json"}}},
            "zones.z",
            "/no/such.json: is not a valid trace file",
        ),
        ({"kind": "trace", "machine_types": TYPES, "zones": {"z": {"region": "w", "mots": 1}}}, "mots", "most"),
    ],
)
def test_bad_settings_are_named(said: dict[str, object], where: str, says: str, tmp_path: Path) -> None:
    """Errors in provider settings name the field and the valid values; no folder is created."""
    bad = Settings(data_dir=tmp_path / "data", providers={"p": said})
    for check in (check_providers, open_providers):
        with pytest.raises(ConfigurationError) as raised:
            check(bad)
        assert where in str(raised.value)
        assert says in str(raised.value)
    assert not (tmp_path / "data").exists()
