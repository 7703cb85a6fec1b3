"""The policies that MAST is compared with: Slurm's and Kueue's."""

from functools import partial

from research.rivals.kueue import Kueue
from research.rivals.slurm import Slurm
from simulation.policies import POLICIES, SchedulingPolicy

RIVALS = {
    policy.name: policy
    for policy in (
        SchedulingPolicy(
            "slurm", "Slurm: multifactor priority, EASY backfill, no preemption", engine=Slurm, fixed_fleet=True,
        ),
        SchedulingPolicy(
            "kueue", "Kueue: a queue for each tenant in one cohort, StrictFIFO, preemption",
            engine=partial(Kueue, strict=True), fixed_fleet=True,
        ),
        SchedulingPolicy(
            "kueue-best-effort", "Kueue with BestEffortFIFO", engine=partial(Kueue, strict=False), fixed_fleet=True
        ),
    )
}  # fmt: skip
ALL_POLICIES = {**POLICIES, **RIVALS}
