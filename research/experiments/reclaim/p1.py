"""Measures P1 on synthetic sites: drift, the adaptivity gap, and the sensitivity of its constants."""

from collections.abc import Iterator
from dataclasses import replace
from math import exp, log, sqrt
from typing import Any

import numpy as np

from agent.network.uplink import CONFIDENCE
from infra.config.scheduling import ReclaimSettings
from infra.reports.tables import ReportTable
from reclaim.arrays import Floats
from reclaim.drift import DriftSettings
from reclaim.hazard import HazardModel, HazardSettings
from reclaim.intervals import IntervalReason, P1Settings, SiteJobs, tick
from reclaim.profile import ProfileSettings
from research.experiments.reclaim.campus import (
    CORE_BYTES_S,
    DAY_S,
    EMERGENCIES_PER_DAY,
    LOCAL_BYTES_S,
    NODES,
    PEAKS_H,
    bandwidth,
    campus,
    payloads,
)
from research.reclaim.adaptivity import adaptivity, lognormal_ratio, second_order_ratio
from research.reclaim.bandwidth import block_means, lower_bound_bytes_s
from research.reclaim.drift_delay import delay, within
from research.reclaim.scenario import Traffic
from research.reclaim.starts import final_feasible
from research.reclaim.state import STALL_SHARE

BLOCK_S = 10.0
"""The length of a block of samples: the order of magnitude of a transfer."""
WINDOW_S = 600.0
"""The length of the window. Bandwidth fluctuates by 60% within 10 minutes (F3)."""

PER_H = EMERGENCIES_PER_DAY / 24
HAZARD_CV, SLOWNESS_CV, CORRELATION = 0.62, 0.31, 0.39
"""The published variation of the hazard and of 1 / B, and their correlation (F4)."""


def table(head: str, rows: Iterator[list[str]]) -> str:
    """Returns a Markdown table. `head`: the names of the columns, separated by ` | `."""
    return ReportTable(head.split(" | "), list(rows)).markdown()


def drift_delays(threshold: float, runs: int = 4000) -> Iterator[list[str]]:
    """Yields, for each factor by which the hazard shifts, the delay of the alarm and the time between false alarms."""
    settings = DriftSettings(threshold=threshold)
    never = delay(settings, 1.0, runs)
    for shift in (1 / 3, 1 / 2, 1 / 1.7, 1.3, 1.5, 1.7, 2.0, 3.0, 6.0):
        found = delay(settings, shift, runs)
        yield [
            f"{threshold:g}", f"{shift:.2g}", f"{found.events:.0f}", f"{found.hours(PER_H):.0f}",
            f"{found.median_expected_events / PER_H:.0f}", f"{never.hours(PER_H) / 24:.0f}",
        ]  # fmt: skip


def drift_arithmetic() -> Iterator[list[str]]:
    """Yields how many departures the published counts imply in the 18 minutes after a shift to 1.7 times the rate."""
    mean = 1.7 * PER_H * 18 / 60
    share = sum(end - start for start, end in PEAKS_H) / 24
    peak = 6 / (1 + 5 * share)
    need = next(n for n in range(10, 1000) if within(0.1, n) >= 0.9)
    yield ["emergency departures a day, of all nodes", f"{EMERGENCIES_PER_DAY:.2f}"]
    yield ["expected in 18 minutes at 1.7 times the rate", f"{mean:.3f}"]
    yield ["...within the daily peaks", f"{mean * peak:.2f}"]
    yield ["...of all departures, with and without notice", f"{mean / 0.42:.2f}"]
    yield ["probability that there is none", f"{exp(-mean):.0%} (peaks: {exp(-mean * peak):.0%})"]
    yield ["departures for an error within 10% with 90% probability", f"{need}"]
    yield ["...at 1.7 times the rate", f"{need / (1.7 * PER_H) / 24:.0f} days"]


def window_convergence(runs: int = 2000, days: int = 40) -> Iterator[list[str]]:
    """Returns when a sliding-window estimate is within 10% of the rate after a shift to 1.7 times the rate.

    The loosest reading of the published criterion: two successive estimates, 9 minutes apart, are within 10%. So 18
    minutes are the earliest possible time.
    """
    draw = np.random.default_rng(5)
    cell_h = 0.15
    for window_h in (1, 6, 24, 24 * 7):
        cells = round(window_h / cell_h)
        later = round(days * 24 / cell_h)
        counts = np.concatenate(
            (draw.poisson(PER_H * cell_h, (runs, cells)), draw.poisson(1.7 * PER_H * cell_h, (runs, later))), axis=1
        )
        total = np.cumsum(counts, axis=1)
        estimate = (total[:, cells:] - total[:, :-cells]) / (cells * cell_h)
        good = np.abs(estimate / (1.7 * PER_H) - 1) < 0.1
        met = good[:, 1:] & good[:, :-1]
        first_h = np.where(met.any(1), (met.argmax(1) + 2) * cell_h, np.inf)
        median = f"{np.median(first_h):.0f}" if np.isfinite(np.median(first_h)) else "never"
        yield [f"{window_h} h", f"{(first_h <= 0.3 + 1e-9).mean():.1%}", median, f"{good[:, later // 2 :].mean():.0%}"]


def adaptivity_gaps() -> Iterator[list[str]]:
    """Returns the gap that follows from the published moments, under several assumptions."""
    first, second = log(1 + HAZARD_CV**2), log(1 + SLOWNESS_CV**2)
    share = sum(end - start for start, end in PEAKS_H) / 24
    two = sqrt(share * (1 - share)) * 5 / (1 + 5 * share)
    # A hazard of two values and a constant bandwidth.
    peaks = adaptivity([6.0, 1.0], [1.0, 1.0], 1.0, [share, 1 - share])
    yield ["lognormal, exact", f"{lognormal_ratio(HAZARD_CV, SLOWNESS_CV, CORRELATION) - 1:.1%}"]
    yield ["any distribution, second order", f"{second_order_ratio(HAZARD_CV, SLOWNESS_CV, CORRELATION) - 1:.1%}"]
    yield ["lognormal with correlation 0", f"{lognormal_ratio(HAZARD_CV, SLOWNESS_CV, 0.0) - 1:.1%}"]
    yield ["(s1 + s2) / 8, the exponent with correlation 0", f"{(first + second) / 8:.4f}"]
    yield [f"hazard 6 times as high in the stated peaks (variation {two:.2f}), constant B", f"{peaks.ratio - 1:.1%}"]


def _waste(found: Floats, true: Floats) -> float:
    """Returns the mean extra cost of intervals that follow `found` instead of the true hazard."""
    error = np.sqrt(found / true)
    return float(((error + 1 / error) / 2 - 1).mean())


def hazard_errors(settings: HazardSettings, sites: int = 8, days: int = 42, warm_days: int = 21) -> tuple[float, ...]:
    """Returns the extra cost of the mean and of the upper bound, and the share of time in which the bound holds."""
    model = HazardModel(settings)
    found = []
    for seed in range(sites):
        draw = np.random.default_rng(seed)
        site = campus(draw)
        node, at_s = site.departures(draw, 0.0, days * DAY_S)
        lent = np.arange(NODES), np.zeros(NODES), np.full(NODES, np.inf)
        state = model.start(site.nodes, site.buildings, 0.0)
        for hour in range(1, days * 24):
            now_s = hour * 3600.0
            state = model.observe(state, now_s, node, at_s, *lent)
            if hour >= warm_days * 24:
                hazards = model.hazards(state, now_s)
                true = site.levels_per_h * site.factor(np.array(now_s))
                held = float((hazards.upper_per_h >= true).mean())
                found.append((_waste(hazards.mean_per_h, true), _waste(hazards.upper_per_h, true), held))
    return tuple(float(one) for one in np.mean(found, axis=0))


def hazard_sensitivity(sites: int = 8) -> Iterator[list[str]]:
    """Returns the errors of the estimator for other values of each constant."""
    base = HazardSettings()
    cases: list[tuple[str, list[Any]]] = [
        ("window_days", [7, 14, 28]), ("confidence", [0.5, 0.8, 0.9, 0.95]), ("node_events", [2.0, 4.0, 8.0]),
        ("building_events", [4.0, 8.0, 16.0]), ("recent_events", [1.0, 2.0, 6.0]), ("recent_h", [0.5, 1.0, 3.0]),
        ("profile.bin_events", [0.5, 1.0, 2.0]), ("profile.memory_days", [14.0, 28.0, 56.0]),
        ("profile.bin_s", [900.0, 1800.0, 3600.0]), ("drift.threshold", [3.0, 5.0, 8.0]),
    ]  # fmt: skip
    for name, values in cases:
        for value in values:
            part, _, field = name.rpartition(".")
            inner = {"profile": ProfileSettings, "drift": DriftSettings}.get(part)
            change = {name: value} if inner is None else {part: inner(**{field: value})}
            mean, bound, held = hazard_errors(replace(base, **change), sites)
            usual = getattr(getattr(base, part) if part else base, field) == value
            yield [f"`{field}`", f"{value:g}{' (default)' if usual else ''}",
                   f"{mean:.1%}", f"{bound:.1%}", f"{held:.0%}"]  # fmt: skip


def bandwidth_sensitivity(links: int = 400) -> Iterator[list[str]]:
    """Returns how often a transfer of 32 s is at least as fast as the bound, and the bound divided by its speed."""
    seconds, transfer_s = 1800, 32
    rates = bandwidth(np.random.default_rng(1), links, seconds + transfer_s, LOCAL_BYTES_S)
    later = rates[:, seconds:].mean(1)
    for window_s, block_s, confidence in (
        (600, 10, 0.95), (120, 10, 0.95), (1800, 10, 0.95), (600, 1, 0.95), (600, 30, 0.95),
        (600, 10, 0.9), (600, 10, 0.75),
    ):  # fmt: skip
        blocks = block_means(rates[:, seconds - window_s : seconds], block_s)
        bound = lower_bound_bytes_s(blocks, 0.0, confidence)
        usual = (window_s, block_s, confidence) == (WINDOW_S, BLOCK_S, CONFIDENCE)
        yield [f"{window_s} s", f"{block_s} s", f"{confidence:g}{' (defaults)' if usual else ''}",
               f"{(later >= bound).mean():.0%}", f"{np.median(bound / later):.2f}"]  # fmt: skip


def control_period(links: int = 200) -> Iterator[list[str]]:
    """Returns the extra cost of intervals that are computed once in a control period instead of in each second."""
    seconds = 4 * 3600
    from_s = 10.5 * 3600
    rates = block_means(bandwidth(np.random.default_rng(2), links, seconds, LOCAL_BYTES_S), 10)
    at_s = from_s + 10 * np.arange(rates.shape[1], dtype=np.float64)
    hazard = campus(np.random.default_rng(2)).factor(at_s)
    root = np.sqrt(hazard / rates)
    # An interval is proportional to 1 / sqrt(hazard B), and its cost at the optimum to sqrt(hazard / B).
    product = np.sqrt(hazard * rates)
    for period_s in (10, 60, 300, 900, 1800):
        step = period_s // 10
        old = np.repeat(product[:, ::step], step, axis=1)[:, : root.shape[1]]
        cost = (root * (old / product + product / old) / 2).sum() / root.sum()
        usual = period_s == ReclaimSettings().control_period_s
        yield [f"{period_s} s{' (default)' if usual else ''}", f"{cost - 1:.1%}"]


def share_sensitivity(jobs: int = 312) -> Iterator[list[str]]:
    """Yields the expected loss, and the reasons for the intervals, by the share of bandwidth for checkpoints.

    A save stalls its job for the measured share of a local write, as in the simulator.
    """
    draw = np.random.default_rng(3)
    size = payloads(draw, jobs)
    hazard = campus(draw).levels_per_h[draw.integers(0, NODES, jobs)]
    for budget_s in (1800.0, 12 * 3600.0):
        columns = SiteJobs(
            np.arange(jobs, dtype=np.uint64),
            hazard,
            size,
            budget_s,
            LOCAL_BYTES_S,
            stall_s=STALL_SHARE * size / Traffic.write_bytes_s,
        )
        for share in (0.1, 0.2, 0.3):
            # 312 jobs on 54 nodes: six share the link of a node on average.
            done = tick(columns, NODES * LOCAL_BYTES_S, P1Settings(write_share=share))
            loss = hazard / 3600 * done.interval_s / 2
            written = size / done.bandwidth_bytes_s / done.interval_s
            kinds = np.bincount(done.reason, minlength=len(IntervalReason)) / jobs
            shown = (IntervalReason.OPTIMUM, IntervalReason.NETWORK_SHARE, IntervalReason.LOSS_BUDGET,
                     IntervalReason.LOSS_BUDGET_UNREACHABLE)  # fmt: skip
            yield [f"{share:g}{' (default)' if share == 0.2 else ''}", f"{budget_s / 3600:g} h",
                   f"{np.median(done.interval_s) / 60:.0f} min", f"{loss.mean():.2%}", f"{written.mean():.1%}",
                   *(f"{kinds[kind]:.0%}" for kind in shown)]  # fmt: skip


def restart_sensitivity(jobs: int = 20_000) -> Iterator[list[str]]:
    """Returns the share of jobs for which a final checkpoint is feasible, by T_r and notice."""
    size = payloads(np.random.default_rng(4), jobs)
    for after_s in (1.0, 10.0, 30.0, 60.0):
        for name, rate in (("820", LOCAL_BYTES_S), ("240", CORE_BYTES_S)):
            shares = [final_feasible(size, rate, after_s, notice_s).mean() for notice_s in (30, 60, 120, 300, 900)]
            yield [f"{after_s:g} s", f"{name} Mbit/s", *(f"{share:.0%}" for share in shares)]


def sections(sites: int = 8) -> Iterator[str]:
    """Returns the measured parts of docs/reclaim.md, one after the other."""
    yield "What 18 minutes can show\n\n" + table("quantity | value", drift_arithmetic())
    head = "window | within 18 minutes | median hours until it is met | share of later time within 10%"
    yield "Sliding window after a shift to 1.7 times the rate\n\n" + table(head, window_convergence())
    head = "threshold | shift | departures until the alarm | mean hours | median hours | days between false alarms"
    yield "Delay of the detector\n\n" + table(head, (row for one in (3.0, 5.0, 8.0) for row in drift_delays(one)))
    yield "Adaptivity gap\n\n" + table("assumption | gap", adaptivity_gaps())
    head = "constant | value | extra cost, mean | extra cost, bound | bound holds"
    yield "Hazard\n\n" + table(head, hazard_sensitivity(sites))
    head = "window | block | confidence | transfer is as fast | bound / speed"
    yield "Bandwidth\n\n" + table(head, bandwidth_sensitivity())
    yield "Control period\n\n" + table("control period | extra cost", control_period())
    head = (
        "`write_share` | L_max | median interval | expected loss | bandwidth written | "
        "`optimum` | `network_share` | `loss_budget` | `loss_budget_unreachable`"
    )
    yield "Share of checkpoints\n\n" + table(head, share_sensitivity())
    head = "T_r or commit | bandwidth | notice 30 s | 1 min | 2 min | 5 min | 15 min"
    yield "Final checkpoint\n\n" + table(head, restart_sensitivity())
