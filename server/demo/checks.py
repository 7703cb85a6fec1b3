"""Checks of the invariants that must hold after every demo run. Each check reports its findings."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from infra.stack.ports import free_port
from mizzen.checkpoint import list_committed
from server.demo.facts import Facts
from server.demo.scenario import DemoWorkload


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool
    found: str


def all_succeeded(facts: Facts) -> Check:
    """Checks that every workload succeeded exactly once."""
    bad = [f"{w['name']} is {w['phase']}" for w in facts.workloads.values() if w["phase"] != "succeeded"]
    ends: dict[str, int] = {}
    for event in facts.events:
        if event["kind"] == "workload.succeeded":
            ends[event["workload"]] = ends.get(event["workload"], 0) + 1
    bad += [f"{facts.workloads[w]['name']} succeeded {n} times" for w, n in ends.items() if n != 1]
    found = "; ".join(bad) or f"{len(facts.workloads)} of {len(facts.workloads)}"
    return Check("every workload succeeded exactly once", not bad and bool(facts.workloads), found)


def slots_held_once(facts: Facts) -> Check:
    """Checks that no GPU slot was held by two tasks at the same time."""
    by_slot: dict[tuple[str, int], list[tuple[float, float, str]]] = {}
    for h in facts.holds:
        by_slot.setdefault((h.machine, h.slot), []).append((h.start_s, h.end_s, f"{h.name}#{h.attempt} {h.task}"))
    clashes = []
    for (machine, slot), holds in sorted(by_slot.items()):
        for (_, end, one), (start, _, other) in pairwise(sorted(holds)):
            if start < end:
                clashes.append(f"{machine} slot {slot}: {one} and {other} for {end - start:.3f} s")
    found = "; ".join(clashes[:5]) or f"{len(facts.holds)} holds of {len(by_slot)} slots"
    return Check("no GPU slot was held by two tasks at the same time", not clashes and bool(by_slot), found)


def redone_work(facts: Facts) -> Check:
    """Checks that each attempt resumed at or after the last checkpoint that the previous attempt reported."""
    bad, moved, redone = [], 0, 0
    for workload in facts.workloads:
        for before, after in pairwise(facts.attempts_of(workload)):
            moved += 1
            if (after.resumed_step or 0) < (before.checkpoint_step or 0):
                bad.append(
                    f"{before.name} attempt {after.attempt} started at step {after.resumed_step or 0}, although step"
                    f" {before.checkpoint_step} was saved"
                )
            redone += max(0, (before.last_step or 0) - (after.resumed_step or 0))
    found = "; ".join(bad) or f"{moved} restarts; {redone} reported steps were repeated"
    return Check("only work after the last checkpoint was repeated", not bad, found)


def happened(facts: Facts, urgent: str, far: str, table: str) -> list[Check]:
    """Checks that every event the demo is meant to show has occurred, such as an eviction and a move."""
    preempted = [e for e in facts.events if e["kind"] == "workload.preempted"]
    evictions = [e for e in preempted if e["reason"]["code"] == "evicted"]
    by_urgent = [e for e in evictions if e["reason"]["detail"].get("evictor") == urgent]
    names = sorted(facts.workloads[e["workload"]]["name"] for e in by_urgent)
    lower = all(e["reason"]["detail"]["rank"] > e["reason"]["detail"]["evictor_rank"] for e in evictions)
    moved = []
    for event in evictions:
        attempts = facts.attempts_of(event["workload"])
        later = [a for a in attempts if a.attempt > event["attempt"]]
        earlier = next(a for a in attempts if a.attempt == event["attempt"])
        if later and later[0].region != earlier.region and later[0].resumed_step:
            moved.append(f"{earlier.name} from {earlier.region} to {later[0].region} at step {later[0].resumed_step}")
    replicas = [e for e in facts.events if e["kind"] == "replica.ready" and e["detail"].get("table") == table]
    ran_at = facts.attempts_of(far)
    lost = [e for e in facts.events if e["kind"] == "machine.lost"]
    survivors = [
        f"{a.name} from step {after.resumed_step} on {after.region}"
        for w in facts.workloads
        for a, after in pairwise(facts.attempts_of(w))
        if a.outcome == "machine_lost" and after.resumed_step
    ]
    return [
        Check(
            "the urgent workload evicted only lower priorities", bool(by_urgent) and lower, ", ".join(names) or "none"
        ),
        Check("an evicted workload resumed in another region", bool(moved), "; ".join(moved) or "none did"),
        Check(
            "a replica was made on demand before its workload was placed",
            bool(replicas) and bool(ran_at) and replicas[0]["at_s"] < ran_at[0].start_s,
            ", ".join(f"{table} to {e['region']}, {e['detail']['bytes']} bytes" for e in replicas) or "none",
        ),
        Check(
            "a gang whose machine failed resumed from its checkpoint",
            bool(lost) and bool(survivors),
            "; ".join(survivors) or "none",
        ),
    ]


async def same_weights(
    facts: Facts, gangs: Sequence[DemoWorkload], buckets: Mapping[str, Path], example: Path, scratch: Path
) -> Check:
    """Checks that the final weights of every workload are byte-identical to an uninterrupted run with the same seed."""
    by_name = {w["name"]: (i, w) for i, w in facts.workloads.items()}
    gate = asyncio.Semaphore(2)

    async def one(gang: DemoWorkload) -> str | None:
        workload, row = by_name[gang.name]
        if row["checkpoint_region"] is None:
            return f"{gang.name}: no checkpoint"
        bucket = buckets[row["checkpoint_region"]]
        async with gate:
            expected = await _uninterrupted(gang, buckets, example, scratch / gang.name)
        got = _weights(bucket / "checkpoints" / workload)
        return None if expected is not None and expected == got else f"{gang.name}: {got} instead of {expected}"

    different = [d for d in await asyncio.gather(*(one(g) for g in gangs)) if d]
    stopped = sum(len(facts.attempts_of(by_name[g.name][0])) > 1 for g in gangs)
    found = "; ".join(different) or f"{len(gangs)} of {len(gangs)}; {stopped} of them were stopped or moved"
    return Check("final weights are byte-identical to those of an uninterrupted run", not different, found)


_WEIGHTS = "model"


def _weights(root: Path) -> tuple[int, str] | None:
    """Returns the step and the checksum of the weights in the newest checkpoint."""
    committed = list_committed(root)
    if not committed:
        return None
    newest = committed[0]
    return newest.step, next(part.checksum for part in newest.parts if part.name == _WEIGHTS)


async def _uninterrupted(
    gang: DemoWorkload, buckets: Mapping[str, Path], example: Path, folder: Path
) -> tuple[int, str] | None:
    table = next(b for b in buckets.values() if (b / "tables" / gang.table).is_dir()) / "tables" / gang.table
    port = free_port()
    processes = []
    for rank in range(gang.tasks):
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "MIZZEN_CHECKPOINT_URI": str(folder),
            "MIZZEN_CHECKPOINT_INTERVAL_S": "3600",
            f"MIZZEN_TABLE_{gang.table.upper()}": str(table),
            "RANK": str(rank),
            "WORLD_SIZE": str(gang.tasks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        arguments = ["--table", gang.table, "--steps", str(gang.steps), "--step-s", "0", "--seed", str(gang.seed)]
        processes.append(
            await asyncio.create_subprocess_exec(
                sys.executable,
                str(example / "train.py"),
                *arguments,
                env=environment,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
        )
    codes = [await process.wait() for process in processes]
    return _weights(folder) if not any(codes) else None
