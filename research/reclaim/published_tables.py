"""The published Tables III and IV, and the bounds that the comparison is judged by."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan

from research.reclaim.compare import Figures, ratio


@dataclass(frozen=True)
class PublishedRow:
    """A row of Table III."""

    loss_gpu_h: float
    downtime_s: float
    success: float
    degradation: float
    utilization: float


TABLE_3: Mapping[str, PublishedRow] = {
    "slurm-pr": PublishedRow(8.2, 195, 0.645, 0.264, 0.381),
    "no-migration": PublishedRow(18.4, nan, 0.0, 0.0, 0.312),
    "static": PublishedRow(7.6, 127, 0.713, 0.184, 0.468),
    "bamboo-like": PublishedRow(4.5, 75, 0.854, 0.082, 0.587),
    "random-dst": PublishedRow(3.8, 98, 0.842, 0.073, 0.591),
    "no-shaping": PublishedRow(3.1, 71, 0.889, 0.310, 0.653),
    "tv-fi": PublishedRow(3.0, 64, 0.904, 0.029, 0.675),
    "published": PublishedRow(2.8, 61, 0.913, 0.028, 0.687),
    "true-rates": PublishedRow(2.6, 53, 0.941, 0.0, 0.714),
}
TABLE_4: Mapping[str, tuple[float, float, float]] = {
    "none": (8.7, 145, 0.348),
    "p1": (4.9, 142, 0.336),
    "p2": (8.1, 79, 0.324),
    "p3": (8.5, 144, 0.031),
    "p1+p2": (3.1, 71, 0.310),
    "p1+p3": (3.8, 98, 0.073),
    "p2+p3": (4.6, 67, 0.029),
    "p1+p2+p3": (2.8, 61, 0.028),
}
"""Work loss in GPU hours, median downtime in seconds, degradation of research traffic, by the protocols that are on."""
SAME = {"p1+p2": "no-shaping", "p1+p3": "random-dst", "p1+p2+p3": "published"}
"""Rows of Table IV that are rows of Table III."""


@dataclass(frozen=True)
class Bound:
    """A bound of the comparison, with what was measured."""

    name: str
    required: str
    measured: str
    is_met: bool | None
    """None: the systems were not run."""


def named(found: Mapping[str, Figures], name: str) -> Figures | None:
    """Returns the figures of a system, which some tables list under another name; None: there are none."""
    other = SAME.get(name) or next((key for key, value in SAME.items() if value == name), None)
    return found.get(name) or (found.get(other) if other else None)


def bounds(found: Mapping[str, Figures]) -> list[Bound]:
    """Returns the bounds with the measured values."""

    def quotient(name: str, required: str, first: str, second: str, value: str, most: float) -> Bound:
        one, two = named(found, first), named(found, second)
        if one is None or two is None:
            return Bound(name, required, "-", None)
        middle, low, high = ratio(one, two, value)
        return Bound(name, required, f"{middle:.2f} ({low:.2f} to {high:.2f})", middle <= most)

    ablation = {name: named(found, name) for name in TABLE_4}
    order = Bound("order of the ablation by work loss as in Table IV", "8 of 8 ranks", "-", None)
    if all(ablation.values()):
        losses = {name: one.mean("loss_gpu_h") for name, one in ablation.items() if one is not None}
        published = sorted(TABLE_4, key=lambda name: TABLE_4[name][0])
        measured = sorted(losses, key=lambda name: losses[name])
        same = sum(a == b for a, b in zip(published, measured, strict=True))
        order = Bound(order.name, order.required, f"{same} of 8; least first: {', '.join(measured)}", same == 8)

    def judged(name: str) -> list[Bound]:
        ours = named(found, name)
        success = Bound(f"{name}: migration success", "at least 91 %", "-", None)
        if ours is not None:
            success = Bound(success.name, success.required, f"{ours.mean('success'):.1%}", ours.mean("success") >= 0.91)
        return [
            quotient(f"{name}: {what}", f"at most {most:g}", name, other, value, most)
            for what, other, value, most in (
                ("work loss over slurm-pr's", "slurm-pr", "loss_gpu_h", 0.34),
                ("work loss over slurm-pr-local's", "slurm-pr-local", "loss_gpu_h", 0.34),
                ("work loss over true-rates'", "true-rates", "loss_gpu_h", 1.08),
                ("median downtime over random-dst's", "random-dst", "downtime_s", 0.62),
            )
        ] + [success]

    return [
        *judged("reclaimnet"),
        *judged("published"),
        quotient("reclaimnet: work loss over sdk's", "at most 1", "reclaimnet", "sdk", "loss_gpu_h", 1.0),
        order,
        quotient("work loss of joint over reclaimnet's", "below 1", "joint", "reclaimnet", "loss_gpu_h", 0.999999),
    ]  # fmt: skip
