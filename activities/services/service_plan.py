"""The desired state of a service: the policy, the autoscaler and the limits, from its specification and its zones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from capacity.offers import Offer
from domain.capacity import CapacityKind
from domain.service import ServiceSpec, UpdateMode
from infra.config.scheduling import ServiceSettings
from infra.db.services import ServiceRow
from services.spot.autoscaler import LoadAutoscaler
from services.spot.policies import PolicySettings, make_policy
from services.spot.spothedge import on_demand, split
from services.spot.spothedge_plus import OUTAGE_PRICE_S
from services.spot.values import Action, Observation, PolicyState, SpotPolicy
from services.values import CanaryRules, ServicePlan
from services.zones import ZoneOffer, option_of

NO_ZONES = "no_spot_zones"
"""The note of a service on spot machines for which no provider offers any."""
ON_DEMAND = "on-demand"
"""The policy of a service without spot machines."""
_PRICE_RATIO = 3.0
"""The price of on-demand machines in units of the mean price of spot machines, if no provider offers on-demand ones.
The paper of SpotHedge assumes three to four."""


@dataclass(frozen=True)
class _WithoutZones:
    """Stands in for the policy of a service on spot machines while no provider offers any.

    The state of that policy is kept. On-demand replicas are launched as far as the service allows them.
    """

    base: int
    fallback: bool

    def start(self) -> PolicyState:
        return PolicyState()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        _, others = split(observation.replicas)
        wanted = observation.target if self.fallback else min(self.base, observation.target)
        return state, on_demand(others, wanted)


def placer_of(spec: ServiceSpec) -> str:
    """Returns the name of the policy that places the replicas."""
    return ON_DEMAND if spec.policy.placer is None else spec.policy.placer


def plan_of(
    row: ServiceRow,
    spec: ServiceSpec,
    zones: Sequence[ZoneOffer],
    on_demand_usd_per_h: float | None,
    settings: ServiceSettings,
    canary: CanaryRules | None = None,
) -> ServicePlan:
    """Returns the plan of a service.

    Args:
        row: the service.
        spec: the specification of the version that is launched.
        zones: the zones in which that version may be launched.
        on_demand_usd_per_h: the price of an on-demand machine; None: unknown, or no provider offers one.
        settings: the settings.
        canary: how the newest version is judged; None: it is not.
    """
    policy = spec.policy
    return ServicePlan(
        policy=_policy(spec, zones, on_demand_usd_per_h, settings),
        autoscaler=_autoscaler(spec),
        version=row.version,
        zones=frozenset(one.zone.name for one in zones),
        min_replicas=policy.min_replicas,
        blue_green=row.mode == UpdateMode.BLUE_GREEN,
        max_surge=spec.max_surge,
        max_unavailable=spec.max_unavailable,
        queued_s=settings.update_queued_s,
        drain_s=spec.serving.drain_s,
        unready_s=settings.unready_s,
        failed_pause_s=settings.failed_pause_s,
        canary=canary,
        policy_speed=settings.policy_speed,
        stopping=row.stopping_at is not None,
    )


def _policy(
    spec: ServiceSpec, zones: Sequence[ZoneOffer], on_demand_usd_per_h: float | None, settings: ServiceSettings
) -> SpotPolicy:
    base, fallback = spec.policy.base_ondemand_fallback_replicas, spec.policy.dynamic_ondemand_fallback
    price_s = spec.policy.outage_price_s
    if spec.uses_spot and not zones:
        return _WithoutZones(base, fallback)
    spot = [one.zone.usd_per_h for one in zones]
    return make_policy(
        placer_of(spec),
        PolicySettings(
            zones=tuple(one.zone for one in zones),
            extra=spec.policy.num_overprovision,
            outage_price_s=OUTAGE_PRICE_S if price_s is None else price_s,
            retry_s=settings.retry_s,
            base=base,
            fallback=fallback,
            on_demand_usd_per_h=on_demand_usd_per_h or (_PRICE_RATIO * sum(spot) / len(spot) if spot else 1.0),
        ),
    )


def on_demand_price(spec: ServiceSpec, offers: Sequence[Offer]) -> float | None:
    """Returns the lowest price of an on-demand machine for a service, in US dollars an hour; None: none is offered."""
    fitting = (o.usd_per_h for o in offers if o.kind is CapacityKind.ON_DEMAND and option_of(spec, o) is not None)
    return min(fitting, default=None)


def _autoscaler(spec: ServiceSpec) -> LoadAutoscaler:
    policy = spec.policy
    return LoadAutoscaler(
        requests_per_s=policy.target_qps_per_replica or math.inf,
        ongoing=policy.target_ongoing_requests,
        load=policy.target_load_per_replica,
        least=policy.min_replicas,
        most=policy.max_replicas if is_scaled(spec) else policy.min_replicas,
        upscale_delay_s=policy.upscale_delay_s,
        downscale_delay_s=policy.downscale_delay_s,
    )


def is_scaled(spec: ServiceSpec) -> bool:
    """Returns whether the number of replicas follows the requests, or the load that replicas report."""
    policy = spec.policy
    targets = policy.target_qps_per_replica, policy.target_ongoing_requests, policy.target_load_per_replica
    return any(one is not None for one in targets) and policy.max_replicas > policy.min_replicas
