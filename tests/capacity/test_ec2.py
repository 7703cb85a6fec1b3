"""The EC2 provider against moto behind a proxy that adds behaviour of EC2 and injects faults."""

import base64
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from pydantic import ValidationError
from sqlalchemy import Engine
from temporalio.client import Client

from capacity.offers import Offer
from capacity.provider import LaunchRefused, ProviderUnavailable, Refusal
from capacity.providers.ec2 import Ec2Provider
from capacity.providers.ec2.provider import SpotPrices, user_data
from capacity.providers.ec2.settings import Ec2Settings
from domain.capacity import CapacityKind
from domain.protocol.machines import TaskExit
from infra.keys import installation_id, load_master_key
from tests.activities.temporal import until
from tests.capacity.ec2 import ZONES, Ec2, ec2
from tests.capacity.requests import request_for
from tests.services.live import service
from tests.services.on_ec2 import OnEc2

SETTINGS: dict[str, Any] = {
    "region": "west",
    "aws_region": "us-east-1",
    "zones": {zone: {} for zone in ZONES},
    "machine_types": {
        "p4d.24xlarge": {
            "gpus": 8, "gpu_type": "a100", "cpus": 96, "memory": "1152GiB", "usd_per_h": 32.77, "spot_usd_per_h": 12.0
        }
    },
    "image": "ami-03cf127a",
    "agent": "mizzen agent --temporal temporal:7233 --platform aws-spot",
}  # fmt: skip
SMALL = {"gpus": 1, "gpu_type": "a100", "cpus": 16, "memory": "16GiB", "usd_per_h": 4.0, "spot_usd_per_h": 1.0}
"""What the simulated agents of services have."""


@pytest.fixture(scope="module")
def region() -> Iterator[Ec2]:
    """A region for all tests of this module."""
    with ec2() as opened:
        yield opened


@pytest.fixture
def provider(region: Ec2) -> Iterator[Ec2Provider]:
    """A provider of the region, which is empty before and after the test."""
    settings = Ec2Settings.model_validate({**SETTINGS, "endpoint": region.url})
    yield Ec2Provider("aws", settings, "0123456789abcdef")
    for one in region.live():
        region.client.terminate_instances(InstanceIds=[one["InstanceId"]])
    region.faults.clear()
    region.asked.clear()
    region.keeps_tokens = True


def offer_of(provider: Ec2Provider, kind: CapacityKind) -> Offer:
    """Returns the provider's first offer of a capacity kind."""
    return next(offer for offer in provider.offers() if offer.kind is kind)


@pytest.mark.parametrize("kind", [CapacityKind.SPOT, CapacityKind.ON_DEMAND])
def test_what_is_launched_is_what_was_asked_for(region: Ec2, provider: Ec2Provider, kind: CapacityKind) -> None:
    """An instance gets the requested type, zone, kind, tags and user data."""
    wanted = request_for(offer_of(provider, kind))
    native_id = provider.launch(wanted)
    (one,) = region.live()
    assert (one["InstanceId"], one["InstanceType"]) == (native_id, "p4d.24xlarge")
    assert one["Placement"]["AvailabilityZone"] == wanted.offer.zone
    assert one.get("InstanceLifecycle") == ("spot" if kind is CapacityKind.SPOT else None)
    assert {tag["Key"]: tag["Value"] for tag in one["Tags"]} == {
        "mizzen:instance": wanted.instance, "mizzen:installation": "0123456789abcdef", "Name": wanted.machine,
    }  # fmt: skip
    sent = region.client.describe_instance_attribute(InstanceId=native_id, Attribute="userData")["UserData"]["Value"]
    assert base64.b64decode(sent).decode() == user_data(provider._settings, wanted)


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        ("InsufficientInstanceCapacity", Refusal.CAPACITY),
        ("SpotMaxPriceTooLow", Refusal.CAPACITY),
        ("MaxSpotInstanceCountExceeded", Refusal.QUOTA),
        ("VcpuLimitExceeded", Refusal.QUOTA),
        ("InvalidAMIID.NotFound", Refusal.REQUEST),
        ("IdempotentParameterMismatch", Refusal.REQUEST),
        ("SomethingNew", Refusal.REQUEST),
    ],
)
def test_refusals_are_told_apart(region: Ec2, provider: Ec2Provider, code: str, refusal: Refusal) -> None:
    """Each EC2 error code gives its kind of refusal immediately, with EC2's message, and launches no instance."""
    region.faults.append(("RunInstances", code))
    with pytest.raises(LaunchRefused) as raised:
        provider.launch(request_for(offer_of(provider, CapacityKind.SPOT)))
    assert raised.value.refusal is refusal
    assert code in raised.value.words
    assert region.asked.count("RunInstances") == 1
    assert region.live() == []


@pytest.mark.parametrize("code", ["AuthFailure", "UnauthorizedOperation", "ExpiredToken"])
def test_credentials_that_are_wrong_refuse_no_offer(region: Ec2, provider: Ec2Provider, code: str) -> None:
    """Invalid credentials make the provider unavailable instead of refusing an offer."""
    region.faults.append(("RunInstances", code))
    with pytest.raises(ProviderUnavailable, match=code):
        provider.launch(request_for(offer_of(provider, CapacityKind.SPOT)))


@pytest.mark.parametrize("fault", ["RequestLimitExceeded", "InternalError", "lost", "down"])
def test_what_passes_is_asked_again_and_launches_once(region: Ec2, provider: Ec2Provider, fault: str) -> None:
    """After throttling, an EC2 error or a lost response, a request with the same token launches one machine."""
    region.faults += [("RunInstances", fault), ("DescribeInstances", fault), ("TerminateInstances", fault)]
    wanted = request_for(offer_of(provider, CapacityKind.SPOT))
    with pytest.raises(ProviderUnavailable):
        provider.launch(wanted)
    native_id = provider.launch(wanted)
    assert region.asked.count("RunInstances") == 2
    assert [one["InstanceId"] for one in region.live()] == [native_id]
    assert [found.native_id for found in provider.describe() if found.ended is None] == [native_id]
    provider.terminate(native_id)
    assert region.live() == []
    assert region.faults == []


def test_a_token_that_was_used_with_other_settings_names_its_machine(region: Ec2, provider: Ec2Provider) -> None:
    """If EC2 refuses a token because the settings have changed since the launch, the existing machine is returned."""
    wanted = request_for(offer_of(provider, CapacityKind.SPOT))
    native_id = provider.launch(wanted)
    region.faults.append(("RunInstances", "IdempotentParameterMismatch"))
    assert provider.launch(wanted) == native_id
    assert len(region.live()) == 1


def test_two_installations_share_an_account(region: Ec2, provider: Ec2Provider, tmp_path: Path) -> None:
    """Installations in one account do not list each other's machines; the tag follows from the master key."""
    ids = []
    for name in ("a", "b"):
        load_master_key(tmp_path / name, create=True)
        ids.append(installation_id(tmp_path / name))
    assert len({*ids, installation_id(tmp_path / "a")}) == 2
    other = Ec2Provider("aws", provider._settings, ids[0])
    wanted = request_for(offer_of(provider, CapacityKind.SPOT))
    provider.launch(wanted)
    assert sum(found.ended is None for found in provider.describe()) == 1
    assert not any(found.ended is None for found in other.describe())


def test_prices_are_the_newest_of_the_history_or_the_settings() -> None:
    """The newest price in the history is used, else the configured one; the history is cached for some minutes."""
    now = datetime.now(UTC)
    history = [
        {"InstanceType": "p4d.24xlarge", "AvailabilityZone": "us-east-1a", "SpotPrice": price, "Timestamp": now - ago}
        for price, ago in (("11.5", timedelta(hours=2)), ("13.25", timedelta(hours=1)), ("9", timedelta(days=2)))
    ]
    old = {
        **history[0],
        "AvailabilityZone": "us-east-1b",
        "SpotPrice": "0.00001",
        "Timestamp": now - timedelta(days=91),
    }

    class Client:
        asked = 0
        broken = False

        def get_paginator(self, _: str) -> "Client":
            return self

        def paginate(self, **_: Any) -> list[dict[str, Any]]:
            self.asked += 1
            if self.broken:
                raise EndpointConnectionError(endpoint_url="here")
            return [{"SpotPriceHistory": history}, {"SpotPriceHistory": [old]}]

    client, clock = Client(), [0.0]
    prices = SpotPrices("aws", Ec2Settings.model_validate(SETTINGS), client, lambda: clock[0])
    assert prices.of("p4d.24xlarge", "us-east-1a") == 13.25
    assert prices.of("p4d.24xlarge", "us-east-1b") == 12.0
    assert client.asked == 1
    clock[0] = 300.0
    assert prices.of("p4d.24xlarge", "us-east-1a") == 13.25
    assert client.asked == 2
    client.broken, clock[0] = True, 600.0
    assert prices.of("p4d.24xlarge", "us-east-1a") == 13.25
    with pytest.raises(ProviderUnavailable):
        SpotPrices("aws", Ec2Settings.model_validate(SETTINGS), client).of("p4d.24xlarge", "us-east-1a")


def test_the_script_of_a_machine(provider: Ec2Provider) -> None:
    """The user data runs `prepare` and then the agent, with secrets in environment variables instead of flags."""
    settings = provider._settings.model_copy(
        update={"prepare": "PATH=$PATH:/opt\necho prepared", "agent": 'sh -c \'echo "$MIZZEN_JOIN_TOKEN" "$@"\' agent'}
    )
    wanted = request_for(offer_of(provider, CapacityKind.SPOT))
    wanted = replace(wanted, bucket_url="s3://b/it's $HOME", join_token="to'ken")
    ran = subprocess.run(["sh"], input=user_data(settings, wanted), capture_output=True, text=True, check=True)
    region, cluster, name = wanted.machine.split("/")
    flags = f"--region {region} --cluster {cluster} --name {name} --rack us-east-1a --bucket s3://b/it's $HOME"
    flags += " --gpus 8 --cpus 96 --memory 1236950581248 --gpu-type a100"
    assert ran.stdout.splitlines() == ["prepared", f"to'ken {flags}"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image": None}, "image or launch_template"),
        ({"zones": {}}, "zones"),
        ({"machine_types": {"p4d": {"usd_per_h": 1}}}, "machine_types"),
        ({"kinds": ["voluntary"]}, "kinds"),
        ({"agent": "a\nb"}, "agent"),
        ({"endpont": "x"}, "endpont"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any], says: str) -> None:
    """Invalid settings are refused before any request to EC2."""
    with pytest.raises(ValidationError, match=says):
        Ec2Settings.model_validate({**SETTINGS, **change})


@pytest.mark.long  # `tests/services/test_live.py` has the life of a replica, the tests above that of an instance.
async def test_a_replica_of_a_service_has_an_instance_for_its_life(
    region: Ec2, database: Engine, database_url: str, client: Client, tmp_path: Path
) -> None:
    """Replicas on spot and on-demand machines get instances of their kind, with the token and the tag of the ledger's
    instance. An instance is terminated when its replica fails or its service ends, and another replica gets another.
    """
    OnEc2.region = region
    settings = Ec2Settings.model_validate(
        {**SETTINGS, "endpoint": region.url, "machine_types": {"p4d.24xlarge": SMALL}}
    )
    provider = Ec2Provider("sim", settings, "0123456789abcdef")
    async with OnEc2.open(database, database_url, client, tmp_path, provider) as live:
        live.up(service(num_overprovision=0, dynamic_ondemand_fallback=False, base_ondemand_fallback_replicas=1))
        ready = await live.ready(2)
        assert sorted(one.kind for one in ready) == ["on_demand", "spot"]
        replicas, ledger = live.replicas(), live.ledger()
        for one in ready:
            row = ledger[replicas[one.replica].workload]
            (found,) = [there for there in region.live() if there["InstanceId"] == row.native_id]
            assert (found["InstanceType"], found["Placement"]["AvailabilityZone"]) == ("p4d.24xlarge", row.zone)
            assert found.get("InstanceLifecycle") == ("spot" if one.kind == "spot" else None)
            assert found["ClientToken"] == row.id
            assert live.tags()[row.native_id] == {
                "mizzen:instance": row.id, "mizzen:installation": "0123456789abcdef", "Name": row.machine,
            }  # fmt: skip
        failed = replicas[ready[0].replica].workload
        ended = ledger[failed].native_id
        live.agents[live.machine_of(ready[0].replica)].ends = TaskExit("server", 0, exit_code=1)
        await until(lambda: ended not in live.tags(), "its instance is terminated")
        await live.ready(2)
        assert len(live.tags()) == 2
        live.down()
        await until(lambda: live.row().ended_at is not None, "the service has ended")
        assert live.tags() == {}
        assert all(row.gone_at is not None for row in live.ledger().values())
