"""A service whose controller a test asks for one decision: its plan, its state and its replicas."""

from collections.abc import Sequence
from dataclasses import replace

from domain.capacity import CapacityKind
from services.controller import decide
from services.spot.autoscaler import LoadAutoscaler
from services.spot.policies import PolicySettings, make_policy
from services.spot.values import Zone
from services.values import (
    Loss,
    ReplicaFacts,
    ServiceDecision,
    ServicePlan,
    ServiceState,
    Stage,
)

ZONES = (Zone("z-0", "r"), Zone("z-1", "r"), Zone("z-2", "s"))
DRAIN_S = 30.0


def fixed_load(target: int) -> LoadAutoscaler:
    return LoadAutoscaler(1.0, least=target, most=target)


def make_plan(version: int = 1, target: int = 2, policy: str = "on-demand", **other: object) -> ServicePlan:
    made = make_policy(policy, PolicySettings(ZONES, 0))
    plan = ServicePlan(made, fixed_load(target), version, min_replicas=target, drain_s=DRAIN_S)
    return replace(plan, **other)  # type: ignore[arg-type]


def make_state(plan: ServicePlan, **other: object) -> ServiceState:
    return replace(ServiceState(plan.policy.start(), plan.autoscaler.start()), **other)  # type: ignore[arg-type]


def make_replica(number: int, version: int = 1, stage: Stage = Stage.READY, **other: object) -> ReplicaFacts:
    one = ReplicaFacts(number, version, CapacityKind.ON_DEMAND, None, stage, 0.0, was_ready=stage is Stage.READY)
    return replace(one, **other)  # type: ignore[arg-type]


def decide_on(
    plan: ServicePlan,
    replicas: Sequence[ReplicaFacts],
    losses: Sequence[Loss] = (),
    state: ServiceState | None = None,
    now_s: float = 100.0,
) -> ServiceDecision:
    return decide(plan, state or make_state(plan), replicas, losses, 0, now_s)
