"""The provider for Amazon EC2, with the user data of its machines and the spot prices."""

import logging
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from capacity.offers import Offer, Shape
from capacity.provider import FoundMachine, LaunchRefused, LaunchRequest, ProviderUnavailable, Refusal
from capacity.providers.agent_command import agent_flags
from capacity.providers.ec2.errors import NOT_THERE, asking, code_of, launching
from capacity.providers.ec2.settings import Ec2Settings
from domain.capacity import CapacityKind
from infra.config.settings import Settings
from infra.keys import installation_id


def user_data(settings: Ec2Settings, request: LaunchRequest) -> str:
    """Returns the shell script that starts the agent of a launched machine.

    Secrets are passed in environment variables: every process of the machine could read command-line flags. The same
    request always gives the same script, because EC2 refuses a client token that is reused with different parameters.
    """
    lines = [
        "#!/bin/sh",
        "set -eu",
        f"export MIZZEN_INSTANCE={shlex.quote(request.instance)}",
        f"export MIZZEN_JOIN_TOKEN={shlex.quote(request.join_token)}",
        f"export MIZZEN_MACHINE_KEY={shlex.quote(request.machine_key)}",
        *([settings.prepare.strip()] if settings.prepare.strip() else []),
        f"exec {settings.agent} {agent_flags(request)}",
    ]
    return "\n".join(lines) + "\n"


_log = logging.getLogger(__name__)
_KEPT = timedelta(days=90)
"""The length of EC2's price history. Older entries are ignored."""


class SpotPrices:
    """The spot prices of one region. Thread-safe."""

    def __init__(
        self, name: str, settings: Ec2Settings, client: Any, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._settings, self._client = name, settings, client
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_s: float | None = None
        self._found: dict[tuple[str, str], float] = {}

    def of(self, machine_type: str, zone: str) -> float:
        """Returns the spot price in US dollars an hour, or the price of the settings if EC2 has none.

        Raises:
            ProviderUnavailable: EC2 does not answer, and prices were never fetched before.
        """
        with self._lock:
            if self._asked_s is None or self._clock() - self._asked_s >= self._settings.prices_s:
                try:
                    self._found = self._newest()
                except ProviderUnavailable as error:
                    if self._asked_s is None:
                        raise
                    _log.warning("%s; keeping the previous prices", error)
                self._asked_s = self._clock()
            found = self._found.get((machine_type, zone))
        said = self._settings.machine_types[machine_type]
        default = said.usd_per_h if said.spot_usd_per_h is None else said.spot_usd_per_h
        return default if found is None else found

    def _newest(self) -> dict[tuple[str, str], float]:
        now = datetime.now(UTC)
        newest: dict[tuple[str, str], tuple[datetime, float]] = {}
        with asking(self._name, "reading spot prices"):
            pages = self._client.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=sorted(self._settings.machine_types),
                ProductDescriptions=["Linux/UNIX"],
                Filters=[{"Name": "availability-zone", "Values": sorted(self._settings.zones)}],
                StartTime=now,
            )
            for page in pages:
                for one in page["SpotPriceHistory"]:
                    key, at = (one["InstanceType"], one["AvailabilityZone"]), one["Timestamp"]
                    if now - at < _KEPT and (key not in newest or at > newest[key][0]):
                        newest[key] = (at, float(one["SpotPrice"]))
        return {key: price for key, (_, price) in newest.items()}


INSTANCE_TAG = "mizzen:instance"
INSTALLATION_TAG = "mizzen:installation"
"""Several installations may share an account: each lists and terminates only machines with its own tag."""
_CONFIG = Config(connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 4, "mode": "standard"})
# Launches are not retried here: EC2 answers 500 if it has no capacity, and pool sizing must learn that immediately.
# Temporary errors are retried by the instance's workflow with the same token.
_ONCE = _CONFIG.merge(Config(retries={"total_max_attempts": 1, "mode": "standard"}))
_HAD = ["pending", "running", "stopping", "stopped"]
_ENDED = ["shutting-down", "terminated"]
"""EC2 lists these for about an hour, with the reason."""


class Ec2Provider:
    """Launches instances of EC2."""

    lists_late_s = 60.0
    """EC2's lists are eventually consistent. AWS documents no bound; the lag is rarely more than a few seconds."""
    queues = False
    impaired = ""

    def __init__(self, name: str, settings: Ec2Settings, installation: str) -> None:
        """`installation` is the tag value that marks the machines of this installation within the account."""
        self.name = name
        self._settings = settings
        self._installation = installation
        where = {"region_name": settings.aws_region, "endpoint_url": settings.endpoint}
        self._client: Any = boto3.client("ec2", config=_CONFIG, **where)
        self._launcher: Any = boto3.client("ec2", config=_ONCE, **where)
        self._prices = SpotPrices(name, settings, self._client)

    def offers(self) -> Sequence[Offer]:
        """See `Provider.offers`."""
        return [
            self._offer(zone, CapacityKind(kind), machine_type)
            for zone in self._settings.zones
            for kind in self._settings.kinds
            for machine_type in self._settings.machine_types
        ]

    def _offer(self, zone: str, kind: CapacityKind, machine_type: str) -> Offer:
        of = self._settings.machine_types[machine_type]
        price = self._prices.of(machine_type, zone) if kind is CapacityKind.SPOT else of.usd_per_h
        shape = Shape(machine_type, of.gpus, of.gpu_type, round(of.cpus * 1000), of.memory)
        return Offer(self.name, self._settings.region, zone, kind, shape, price, self._settings.start_s)

    def launch(self, request: LaunchRequest) -> str:
        """See `Provider.launch`. EC2 remembers client tokens, so a repeated request returns the same instance."""
        offer = request.offer
        if offer.zone not in self._settings.zones or offer.kind.value not in self._settings.kinds:
            words = f"{offer.kind.value} capacity in zone {offer.zone} is not in the settings of provider {self.name}"
            raise LaunchRefused(Refusal.REQUEST, words)
        try:
            with launching(self.name):
                answer = self._launcher.run_instances(**self._asked(request))
        except LaunchRefused as refused:
            # An earlier request used this token, its response was lost, and the settings have changed since.
            found = [one for one in self.describe() if one.instance == request.instance] if _used(refused) else []
            if not found:
                raise
            return found[0].native_id
        return str(answer["Instances"][0]["InstanceId"])

    def _asked(self, request: LaunchRequest) -> dict[str, Any]:
        offer, settings = request.offer, self._settings
        tags = {INSTANCE_TAG: request.instance, INSTALLATION_TAG: self._installation, "Name": request.machine}
        out: dict[str, Any] = {
            "ClientToken": request.instance,
            "MinCount": 1,
            "MaxCount": 1,
            "InstanceType": offer.shape.machine_type,
            "Placement": {"AvailabilityZone": offer.zone},
            "UserData": user_data(settings, request),
            # A machine that shuts itself down is terminated, and costs nothing.
            "InstanceInitiatedShutdownBehavior": "terminate",
            "TagSpecifications": [
                {"ResourceType": "instance", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
            ],
        }
        if offer.kind is CapacityKind.SPOT:
            once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            out["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": once}
        if settings.image is not None:
            out["ImageId"] = settings.image
        if settings.launch_template is not None:
            out["LaunchTemplate"] = {"LaunchTemplateName": settings.launch_template}
        if (subnet := settings.zones[offer.zone].subnet) is not None:
            out["SubnetId"] = subnet
        if settings.security_groups:
            out["SecurityGroupIds"] = list(settings.security_groups)
        if settings.instance_profile is not None:
            out["IamInstanceProfile"] = {"Name": settings.instance_profile}
        return out

    def describe(self) -> Sequence[FoundMachine]:
        """See `Provider.describe`."""
        filters = [
            {"Name": f"tag:{INSTALLATION_TAG}", "Values": [self._installation]},
            {"Name": "instance-state-name", "Values": [*_HAD, *_ENDED]},
        ]
        with asking(self.name, "listing instances"):
            pages = list(self._client.get_paginator("describe_instances").paginate(Filters=filters))
        found = [one for page in pages for reservation in page["Reservations"] for one in reservation["Instances"]]
        return [
            FoundMachine(one["InstanceId"], tags[INSTANCE_TAG], one["LaunchTime"].timestamp(), ended=_why_ended(one))
            for one in found
            if INSTANCE_TAG in (tags := {tag["Key"]: tag["Value"] for tag in one.get("Tags", ())})
        ]

    def terminate(self, native_id: str) -> None:
        """See `Provider.terminate`."""
        with asking(self.name, f"terminating {native_id}"):
            try:
                self._client.terminate_instances(InstanceIds=[native_id])
            except ClientError as error:
                if code_of(error) not in NOT_THERE:
                    raise


def _why_ended(one: dict[str, Any]) -> str | None:
    """Returns why an instance has ended, as EC2 states it; None: it has not ended."""
    state = str(one["State"]["Name"])
    return str(one.get("StateReason", {}).get("Message") or state) if state in _ENDED else None


def _used(refused: LaunchRefused) -> bool:
    return refused.words.startswith("IdempotentParameterMismatch")


def open_provider(name: str, settings: Ec2Settings, installation: Settings) -> Ec2Provider:
    """Returns the provider, without calling EC2.

    Raises:
        ConfigurationError: this machine has no master key. The installation's tag is derived from it.
    """
    return Ec2Provider(name, settings, installation_id(installation.master_key_path))
