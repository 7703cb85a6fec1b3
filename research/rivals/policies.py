"""The policies that MAST is compared with: Slurm's and Kueue's."""

from functools import partial

from research.rivals.kueue import Kueue
from research.rivals.slurm import Slurm
from simulation.engine import Engine
from simulation.policies import POLICIES, Policy
from simulation.run import Scenario, credit_weights
from simulation.supply import Machines


def _slurm(scenario: Scenario, machines: Machines) -> Engine:
    settings = scenario.settings
    return Slurm(machines, credit_weights(settings), scenario.workloads, scenario.tenants, settings)


def _kueue(scenario: Scenario, machines: Machines, *, strict: bool) -> Engine:
    weights = credit_weights(scenario.settings)
    return Kueue(machines, weights, scenario.workloads, scenario.tenants, strict=strict)


RIVALS = {
    policy.name: policy
    for policy in (
        Policy("slurm", "Slurm: multifactor priority, EASY backfill, no preemption", engine=_slurm, fixed_fleet=True),
        Policy(
            "kueue", "Kueue: a queue for each tenant in one cohort, StrictFIFO, preemption",
            engine=partial(_kueue, strict=True), fixed_fleet=True,
        ),
        Policy(
            "kueue-best-effort", "Kueue with BestEffortFIFO", engine=partial(_kueue, strict=False), fixed_fleet=True
        ),
    )
}  # fmt: skip
ALL_POLICIES = {**POLICIES, **RIVALS}
