"""A service on EC2: moto's instances behind the proxy of `tests.capacity.ec2`, simulated agents."""

import base64
import re
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, select
from temporalio.client import Client

from domain.protocol import TaskExit
from infra.db.capacity import InstanceRow
from providers.ec2 import Ec2Provider
from providers.ec2.settings import Ec2Settings
from tests.activities.temporal import until
from tests.capacity.ec2 import ZONES, Ec2, ec2
from tests.services.live import Live, service

INSTALLATION = "0123456789abcdef"
SETTINGS: dict[str, Any] = {
    "region": "west",
    "aws_region": "us-east-1",
    "zones": {zone: {} for zone in ZONES},
    "machine_types": {
        "p4d.24xlarge": {
            "gpus": 1, "gpu_type": "a100", "cpus": 16, "memory": "16GiB", "usd_per_h": 4.0, "spot_usd_per_h": 1.0
        }
    },
    "image": "ami-03cf127a",
    "agent": "mizzen agent --temporal temporal:7233",
}  # fmt: skip


class OnEc2(Live):
    """The installation, whose machines are instances of EC2. Their user data is read, not run."""

    region: Ec2

    def started(self) -> dict[str, tuple[str, str]]:
        """See `Live.started`."""
        out = {}
        for native_id, tags in self.tags().items():
            sent = self.region.client.describe_instance_attribute(InstanceId=native_id, Attribute="userData")
            script = base64.b64decode(sent["UserData"]["Value"]).decode()
            exported = dict(re.findall(r"^export (\w+)=(\S+)$", script, re.MULTILINE))
            out[tags["Name"]] = exported["MIZZEN_INSTANCE"], exported["MIZZEN_JOIN_TOKEN"]
        return out

    def tags(self) -> dict[str, dict[str, str]]:
        """Returns the tags of the instances that run, by their id."""
        return {one["InstanceId"]: {tag["Key"]: tag["Value"] for tag in one["Tags"]} for one in self.region.live()}

    def ledger(self) -> dict[str, InstanceRow]:
        """Returns the ledger's instances of the service by the workload of their replica."""
        own = select(InstanceRow).where(InstanceRow.pool == self.service)
        with self.world.session() as session:
            rows = list(session.scalars(own))
            session.expunge_all()
            return {str(row.workload): row for row in rows}


async def test_a_replica_has_an_instance_for_its_life(
    database: Engine, database_url: str, client: Client, tmp_path: Path
) -> None:
    """Replicas on spot and on-demand machines get instances of their kind, with the token and the tag of the ledger's
    instance. An instance is terminated when its replica fails or its service ends, and another replica gets another.
    """
    with ec2() as region:
        OnEc2.region = region
        provider = Ec2Provider("sim", Ec2Settings.model_validate({**SETTINGS, "endpoint": region.url}), INSTALLATION)
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
                    "mizzen:instance": row.id, "mizzen:installation": INSTALLATION, "Name": row.machine,
                }  # fmt: skip
            failed = replicas[ready[0].replica].workload
            live.agents[live.machine_of(ready[0].replica)].ends = TaskExit("server", 0, exit_code=1)
            await until(lambda: ledger[failed].native_id not in live.tags(), "its instance is terminated")
            await live.ready(2)
            assert len(live.tags()) == 2
            live.down()
            await until(lambda: live.row().ended_at is not None, "the service has ended")
            assert live.tags() == {}
            assert all(row.gone_at is not None for row in live.ledger().values())
