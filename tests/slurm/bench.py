"""A provider on a real Slurm cluster, whose pilots only sleep."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from capacity.providers.slurm import SettingsOf, SlurmProvider
from tests.capacity.bench import Bench
from tests.slurm.cluster import SlurmCluster, cluster, missing, rest_missing

PARTITIONS = {"batch": {"kind": "spot"}, "urgent": {"price_factor": 2}}


def settings_for(slurm: SlurmCluster, **more: Any) -> dict[str, Any]:
    """Returns the settings of a provider on a cluster. Its machines have half of a node's CPUs and GPUs."""
    (folder := slurm.folder / "pilots").mkdir(exist_ok=True)
    half = {"gpus": 1, "gpu_type": "a100", "cpus": 2, "memory": "1GiB", "usd_per_h": 1.0, "gres": "gpu:a100:1"}
    return {
        "region": "west",
        "partitions": PARTITIONS,
        "machine_types": {"half": half},
        "folder": str(folder),
        "state_dir": str(slurm.folder),
        # Like an agent, it does not end at the signal of `--signal`.
        "agent": "sh -c \"trap '' USR1; exec sleep 600\" #",
        "address": "127.0.0.1",
        "config": str(slurm.conf),
        "timeout_s": 15,
        **more,
    }


TRANSPORTS = ("commands", "rest")
"""How a provider reaches Slurm."""


def provider_on(there: SlurmCluster, transport: str, **more: Any) -> SlurmProvider:
    """Returns a provider on a cluster."""
    rest = {"rest": there.rest} if transport == "rest" else {}
    return SlurmProvider("hpc", SettingsOf.model_validate(settings_for(there, **rest, **more)), "0123456789abcdef")


@contextmanager
def _on_one_node(transport: str) -> Iterator[Bench]:
    if (why := missing() or (rest_missing() if transport == "rest" else None)) is not None:
        pytest.skip(why)
    with cluster(1, rest=transport == "rest") as there:

        @contextmanager
        def away() -> Iterator[None]:
            there.stop_controller()
            yield
            there.start_controller()
            there.until(lambda: there.jobs() is not None, "the controller answers")

        provider = provider_on(there, transport)
        provider.lists_late_s = 0.0  # This controller does not crash.
        yield Bench(provider, away)


def slurm(_: Path) -> AbstractContextManager[Bench]:
    """Returns a bench on a cluster of one node, which holds two pilots."""
    return _on_one_node("commands")


def slurmrestd(_: Path) -> AbstractContextManager[Bench]:
    """Returns the same over slurmrestd."""
    return _on_one_node("rest")
