"""For each kind of provider: a usable instance, and a way to make it unavailable, for the conformance tests.

Every registered kind of provider must be listed in `BENCHES`; `test_conformance.py` fails otherwise. `KIND:VARIANT`
is a second way to use a kind.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import boto3
from botocore.config import Config

from capacity.providers.ec2 import Ec2Provider
from capacity.providers.ec2.settings import Ec2Settings
from capacity.providers.static import StaticProvider
from capacity.providers.trace.cloud import Cloud
from capacity.providers.trace.provider import TraceProvider
from capacity.providers.trace.settings import TraceProviderSettings
from tests.capacity.bench import Bench
from tests.capacity.ec2 import ZONES, ec2
from tests.capacity.site import CLOUD
from tests.kubernetes.bench import kubernetes
from tests.slurm.bench import slurm, slurmrestd


@contextmanager
def _trace(folder: Path) -> Iterator[Bench]:
    settings = TraceProviderSettings.model_validate(CLOUD)
    cloud = Cloud(settings, folder / "cloud")

    @contextmanager
    def away() -> Iterator[None]:
        hidden = (folder / "cloud").rename(folder / "hidden")
        yield
        hidden.rename(folder / "cloud")

    yield Bench(TraceProvider("sim", settings, cloud), away)


@contextmanager
def _static(_: Path) -> Iterator[Bench]:
    @contextmanager
    def away() -> Iterator[None]:
        yield

    yield Bench(StaticProvider("static"), away)


@contextmanager
def _ec2(_: Path) -> Iterator[Bench]:
    with ec2() as region:
        settings = Ec2Settings.model_validate(
            {
                "region": "west",
                "aws_region": "us-east-1",
                "endpoint": region.url,
                "zones": {zone: {} for zone in ZONES},
                "machine_types": {"c5.large": {"cpus": 2, "memory": "4GiB", "usd_per_h": 0.085}},
                "image": "ami-03cf127a",
                "agent": "mizzen agent --temporal temporal:7233",
            }
        )

        @contextmanager
        def away() -> Iterator[None]:
            clients = provider._client, provider._launcher
            nowhere = boto3.client("ec2", endpoint_url="http://127.0.0.1:9", config=_IMPATIENT)
            provider._client = provider._launcher = nowhere
            yield
            provider._client, provider._launcher = clients

        provider = Ec2Provider("aws", settings, "0123456789abcdef")
        provider.lists_late_s = 0.0  # moto's list has no delay.
        yield Bench(provider, away)


_IMPATIENT = Config(connect_timeout=1, read_timeout=1, retries={"max_attempts": 0}, region_name="us-east-1")
BENCHES: Mapping[str, Callable[[Path], AbstractContextManager[Bench]]] = {
    "ec2": _ec2,
    "kubernetes": kubernetes,
    "slurm": slurm,
    "slurm:rest": slurmrestd,
    "static": _static,
    "trace": _trace,
}
