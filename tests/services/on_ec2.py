"""A service on EC2: moto's instances behind the proxy of `tests.capacity.ec2`, simulated agents."""

import base64
import re

from sqlalchemy import select

from infra.db.capacity import InstanceRow
from tests.capacity.ec2 import Ec2
from tests.services.live import Live


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
