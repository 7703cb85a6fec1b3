"""Small generated data in the formats of the public traces."""

import json
import random
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from research.experiments.cases import HOUR_S, Sizes

SHORT = Sizes(warm_up_s=HOUR_S, measured_s=2 * HOUR_S, after_s=HOUR_S, machines=8, philly_machines=40)
BURST_H = 20


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes two days in the formats of both traces; gangs arrive in hours 20 and 21, and one in hour 5."""
    folder = tmp_path_factory.mktemp("traces")
    chance = random.Random(5)
    begin = datetime(2017, 10, 3)
    philly = ["timestamp,duration,num_gpus,gpu_time,cluster"]
    pods = [
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
    ]
    for k in range(700):
        at_s = chance.uniform(0, 48 * HOUR_S)
        gang = BURST_H * HOUR_S <= at_s < (BURST_H + 2) * HOUR_S and k % 2 == 0
        gpus, duration_s = (8 if gang else chance.choice((1, 1, 2))), chance.choice((300.0, 3000.0, 9000.0))
        stamp = (begin + timedelta(seconds=int(at_s))).isoformat(sep=" ")
        philly.append(f"{stamp},{duration_s},{gpus},{gpus * duration_s},{chance.choice('abcdef')}")
        qos = chance.choice(("LS", "BE", "Burstable", "Guaranteed"))
        pods.append(f"pod-{k},4000,8192,{gpus},1000,,{qos},Succeeded,{at_s:.0f},{at_s + duration_s:.0f},{at_s:.0f}")
    philly.append(f"{(begin + timedelta(hours=5)).isoformat(sep=' ')},300.0,16,4800,a")
    nodes = ["sn,cpu_milli,memory_mib,gpu,model"]
    nodes += [f"n{k},96000,393216,8,{'G2' if k % 3 else 'V100'}" for k in range(30)] + ["odd,8000,61440,1,P100"]
    (folder / "philly.csv").write_text("\n".join(philly) + "\n")
    (folder / "openb_pod_list_default.csv").write_text("\n".join(pods) + "\n")
    (folder / "openb_node_list_gpu_node.csv").write_text("\n".join(nodes) + "\n")
    return folder


@pytest.fixture(scope="package")
def data_with_spot(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adds spot capacity that changes over time, and prices: spot costs a quarter."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "ml-jobs").symlink_to(data)
    chance = random.Random(3)
    for group in ("AWS1", "AWS2"):
        (folder / "spot-availability" / group).mkdir(parents=True)
        for zone in ("a", "b", "c"):
            counts = [chance.choice((0, 2, 3, 4)) for _ in range(60) for _ in range(4)]
            trace = {"metadata": {"gap_seconds": 300}, "data": counts}
            (folder / "spot-availability" / group / f"{zone}_v100_1.json").write_text(json.dumps(trace))
    (folder / "prices").mkdir()
    rows = ["InstanceType,AcceleratorName,AcceleratorCount,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"]
    rows += [f",{name},1,0,{name},{usd},{usd / 4},r,r-a" for name, usd in (("V100", 2.0), ("P100", 1.0))]
    (folder / "prices" / "gcp-2022-06-24.csv").write_text("\n".join(rows) + "\n")
    return folder
