"""The policies that MAST is compared with: those of Slurm, Kueue, KAI and Volcano."""

from functools import partial

from research.rivals.kueue import Kueue, KueueFair
from research.rivals.queues import Kai, Volcano
from research.rivals.slurm import Slurm, SlurmQos
from simulation.policies import POLICIES, SchedulingPolicy

RIVALS = {
    policy.name: policy
    for policy in (
        SchedulingPolicy(
            "slurm", "Slurm: multifactor priority, EASY backfill, no preemption", engine=Slurm, fixed_fleet=True,
        ),
        SchedulingPolicy(
            "slurm-qos", "Slurm with preemption by quality of service, and account limits", engine=SlurmQos,
            fixed_fleet=True,
        ),
        SchedulingPolicy(
            "kueue", "Kueue: a queue for each tenant in one cohort, StrictFIFO, preemption",
            engine=partial(Kueue, strict=True), fixed_fleet=True,
        ),
        SchedulingPolicy(
            "kueue-best-effort", "Kueue with BestEffortFIFO", engine=partial(Kueue, strict=False), fixed_fleet=True
        ),
        SchedulingPolicy("kueue-fair", "Kueue, BestEffortFIFO with fair sharing", engine=KueueFair, fixed_fleet=True),
        SchedulingPolicy("kai", "KAI: quotas, then equal parts of the surplus; reclaim", engine=Kai, fixed_fleet=True),
        SchedulingPolicy(
            "volcano", "Volcano: shares by weight (proportion), preempt and reclaim", engine=Volcano, fixed_fleet=True
        ),
    )
}  # fmt: skip
ALL_POLICIES = {**POLICIES, **RIVALS}
