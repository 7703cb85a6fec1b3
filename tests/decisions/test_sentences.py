"""Sentences of reasons: singular and plural for 0, 1 and many, and no unfilled fields."""

import re
from pathlib import Path

import pytest

from domain.reasons import Reason, ReasonCode

SENTENCES = [
    (ReasonCode.COMPLETED, {"tasks": 1}, "its task ended with exit code 0"),
    (ReasonCode.COMPLETED, {"tasks": 2}, "all 2 tasks ended with exit code 0"),
    (
        ReasonCode.RETRIES_EXHAUSTED,
        {"task": "a/0", "status": "exit code 3", "retries": 0},
        "task a/0 ended with exit code 3 and no retries are allowed",
    ),
    (
        ReasonCode.RETRIES_EXHAUSTED,
        {"task": "a/0", "status": "exit code 3", "retries": 1},
        "task a/0 ended with exit code 3 and its 1 retry is used up",
    ),
    (
        ReasonCode.RETRIES_EXHAUSTED,
        {"task": "a/0", "status": "exit code 3", "retries": 2},
        "task a/0 ended with exit code 3 and all 2 retries are used up",
    ),
    (
        ReasonCode.RETRIES_EXHAUSTED,
        {"task": "a/0", "status": "signal 9", "retries": 2, "exit": "137"},
        "task a/0 ended with signal 9 and all 2 retries are used up for exit status 137",
    ),
    (
        ReasonCode.RESTARTS_EXHAUSTED,
        {"words": "machine m stopped answering", "limit": "lost", "retries": 1},
        "machine m stopped answering; limits.retries.lost of its document allows 1 restart after this",
    ),
    (ReasonCode.AWARDED, {"region": "r", "machines": 1, "victims": 0}, "placed in r on 1 machine"),
    (ReasonCode.AWARDED, {"region": "r", "machines": 1, "victims": 1}, "placed in r on 1 machine, evicting 1 workload"),
    (
        ReasonCode.AWARDED,
        {"region": "r", "machines": 2, "victims": 21},
        "placed in r on 2 machines, evicting 21 workloads",
    ),
    *(
        (
            ReasonCode.MOVED,
            {"from": ["m1"], "to": ["m2", "m3"], "freed": freed},
            f"moved from m1 to m2, m3, so that {said} free; it continues from its checkpoint",
        )
        for freed, said in ((1, "1 whole machine becomes"), (2, "2 whole machines become"))
    ),
    *(
        (
            ReasonCode.OUTPUTS_NOT_STORED,
            {"name": "model", "task": "a/0", "why": "out does not exist", "more": more},
            f"output model of task a/0 was not stored: out does not exist{said}",
        )
        for more, said in ((0, ""), (1, ", and 1 more was not"), (2, ", and 2 more were not"))
    ),
    (
        ReasonCode.RESIZED,
        {"tasks": 1, "more": 4},
        "stopped with 1 task, to continue from its checkpoint with 4",
    ),
    (
        ReasonCode.SHRUNK,
        {"tasks": 8, "fewer": 1, "evictor": "w-1"},
        "shrunk from 8 to 1 task for w-1, which has evicted it; it continues from its checkpoint",
    ),
    (
        ReasonCode.FEWER_TASKS,
        {"tasks": 2, "most": 4},
        (
            "it runs with 2 tasks of at most 4; unless the operator has switched growth off, it is started again with"
            " more if slots are free that its tenant's quota"
            " admits and no workload waits for, and if the added work exceeds the cost of the restart"
        ),
    ),
    (ReasonCode.STARTING_TASKS, {"tasks": 1, "machines": 1}, "starting 1 task on 1 machine"),
    (ReasonCode.STARTING_TASKS, {"tasks": 11, "machines": 2}, "starting 11 tasks on 2 machines"),
    (
        ReasonCode.INSUFFICIENT_CAPACITY,
        {"region": "r", "placeable": 0, "tasks": 1, "job": "j", "evictable": 0},
        "region r can now place 0 of 1 task of job j; no workload of lower priority can be evicted",
    ),
    (
        ReasonCode.INSUFFICIENT_CAPACITY,
        {"region": "r", "placeable": 1, "tasks": 3, "job": "j", "evictable": 1},
        "region r can now place 1 of 3 tasks of job j, even if it evicts 1 workload of lower priority",
    ),
    (
        ReasonCode.INSUFFICIENT_CAPACITY,
        {"region": "r", "placeable": 0, "tasks": 1, "job": "j", "evictable": 0, "protected_until": "<time>"},
        (
            "region r can now place 0 of 1 task of job j; no workload of lower priority can be evicted; those that"
            " started recently are protected from eviction, the first until <time>"
        ),
    ),
    (
        ReasonCode.CAPACITY_REFUSED,
        {"provider": "p", "machine_type": "m", "kind": "spot", "zone": "z", "words": "no", "retry_at": "<time>"},
        "p has no m (spot) in z now: no; it is tried again from <time> on",
    ),
    (
        ReasonCode.KEEPS_FAILING_GANGS,
        {"failures": 1, "workload": "wl-1"},
        "1 workload lost tasks or failed to start them here; the last was wl-1",
    ),
    (
        ReasonCode.KEEPS_FAILING_GANGS,
        {"failures": 3, "workload": "wl-1"},
        "3 workloads in a row lost tasks or failed to start them here; the last was wl-1",
    ),
    (
        ReasonCode.REPLICATING_DATA,
        {"table": "t", "region": "r", "done_bytes": 0, "total_bytes": 1},
        "table t is being copied to r: 0 of 1 byte",
    ),
]


@pytest.mark.parametrize(("code", "detail", "sentence"), SENTENCES)
def test_numbers_and_nouns_agree(code: ReasonCode, detail: dict[str, object], sentence: str) -> None:
    """The noun has the singular or plural form of its number."""
    assert Reason(code, detail).sentence == sentence


@pytest.mark.parametrize("code", ReasonCode)
def test_every_code_has_a_sentence(code: ReasonCode) -> None:
    """Every reason code has a sentence, even without details: a missing field is shown as a question mark."""
    sentence = Reason(code, {"victims": ["a", "b"]}).sentence
    assert sentence and not set(sentence) & set("{}|#")


def test_every_code_is_produced(checkout: Path) -> None:
    """Every code of the closed list occurs outside the list, in a package of the server."""
    folders = [init.parent for init in checkout.glob("*/__init__.py") if init.parent.name not in ("tests", "reference")]
    listed = checkout / "domain/reasons.py"
    found = set(re.findall(r"Reason\(ReasonCode\.([A-Z_]+)", listed.read_text()))
    for path in (path for folder in folders for path in folder.rglob("*.py") if path != listed):
        found.update(re.findall(r"ReasonCode\.([A-Z_]+)", path.read_text()))
    assert {code.name for code in ReasonCode} - found == set()
