"""The results of a run: a table row for each command with which owners took machines back, and external checks."""

from dataclasses import dataclass
from itertools import pairwise

from rigs.demos.lending.scenario import LendingCourse, Word
from rigs.demos.lending.steps import StepLine, done

NOW_S = 1.0
"""Upper bound of the time from `mizzen reclaim --now` until no task runs."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    event: str
    gone_s: float
    """From the start of the command until no task ran."""
    free_s: float
    """From the start of the command until it had said `free` and ended."""
    bound_s: float
    """Bound of `gone_s`."""
    redone: int
    """Number of repeated steps, summed over all trainings that had to leave."""
    allowed: int
    """Bound of `redone`: 0 with a notice, else the steps after the newest checkpoint in the store."""
    skipped: int
    """Number of steps that no attempt executed."""


@dataclass(frozen=True)
class OutcomeCheck:
    """The result of one check."""

    name: str
    passed: bool
    found: str
    timed: bool = False
    """Whether it depends on how fast the computer is."""


def taken(course: LendingCourse) -> list[Word]:
    """Returns the owners' commands that took resources from the trainings."""
    return [word for word in course.words if word.moved]


def _redone(course: LendingCourse, word: Word) -> tuple[int, int, int]:
    """Returns the numbers of repeated steps, of steps that were allowed to be repeated, and of skipped steps."""
    redone = allowed = skipped = 0
    for name, attempt in word.moved.items():
        ranks = course.lines[name]
        last = max(done(rank, attempt)[-1] for rank in ranks)
        first = {done(rank, attempt + 1)[0] for rank in ranks}
        redone += last + 1 - min(first)
        skipped += max(0, max(first) - last - 1)
        allowed += 0 if word.notice_s else last - (word.stored[name] or 0)
    return redone, allowed, skipped


def rows(course: LendingCourse) -> list[Row]:
    """Returns a row for each of the commands in `taken`."""
    out = []
    for word in taken(course):
        gone_s = (word.gone_s or word.answered_s) - word.said_s
        bound_s = word.notice_s or NOW_S
        event = f"{word.machine.partition('/')[2]}: {word.text}"
        out.append(Row(event, gone_s, word.answered_s - word.said_s, bound_s, *_redone(course, word)))
    return out


def checks(course: LendingCourse) -> list[OutcomeCheck]:
    """Returns all checks."""
    words, table = taken(course), rows(course)
    left = [pid for word in words for pid in word.left]
    late = [row.event for row in table if row.gone_s > row.bound_s]
    lost = [row.event for row in table if row.redone > row.allowed or row.skipped]
    return [
        OutcomeCheck(
            "when the command said free, no process of a task used these GPUs",
            all(word.free for word in words) and not left,
            f"{len(words)} times" if not left else f"processes {left}",
        ),
        OutcomeCheck(
            f"tasks had left within the notice, or within {NOW_S:g} s", not late, "; ".join(late) or "all", True
        ),
        OutcomeCheck(
            "no step was lost with a notice, and without only those after the last checkpoint",
            not lost,
            "; ".join(lost) or f"{sum(row.redone for row in table)} steps were done again",
        ),
        _others_went_on(course),
        _in_the_stores(course),
        _same_weights(course),
        _held_once(course),
        OutcomeCheck(
            "Ctrl-C at the end left no process",
            course.exit_code == 0 and not course.left,
            f"exit code {course.exit_code}, {len(course.left)} processes",
        ),
    ]


def _others_went_on(course: LendingCourse) -> OutcomeCheck:
    """Checks that trainings on other GPUs of the machine went on in the same processes."""
    found, bad = 0, []
    for word in (word for word in taken(course) if "--gpus" in word.arguments):
        for name, ranks in course.lines.items():
            here = [line for line in ranks[0] if line.machine == word.machine and line.at_s < word.said_s]
            if name in word.moved or not here or here[-1].attempt != ranks[0][_at(ranks[0], word.said_s)].attempt:
                continue
            found += 1
            after = ranks[0][_at(ranks[0], word.answered_s) + 1]
            if after.pid != here[-1].pid:
                bad.append(name)
    return OutcomeCheck(
        "trainings on the other three GPUs went on in the same processes", found == 3 and not bad,
        f"{found} trainings" if not bad else ", ".join(bad),
    )  # fmt: skip


def _at(lines: list[StepLine], at_s: float) -> int:
    """Returns the index of the last line before a time."""
    return max(index for index, line in enumerate(lines) if line.at_s < at_s)


def _in_the_stores(course: LendingCourse) -> OutcomeCheck:
    """Checks that each attempt saved in the store of the building in which it ran."""
    bad, moves = [], 0
    for word in taken(course):
        for name, (machine, step) in word.arrived.items():
            moves += 1
            if word.stored[name] is None or step is None or word.strayed:
                bad.append(f"{name} from {word.machine} to {machine}")
    return OutcomeCheck(
        "each attempt saved in the store of its own building", moves > 0 and not bad, "; ".join(bad) or f"{moves} moves"
    )


def _same_weights(course: LendingCourse) -> OutcomeCheck:
    """Checks that the weights after every step, also repeated ones, are those of an uninterrupted run."""
    steps, bad = 0, set()
    for name, ranks in course.lines.items():
        expected = {line.step: line.digest for line in course.expected[name] if line.event == "step"}
        for rank in ranks:
            own = [line for line in rank if line.event == "step"]
            steps += len(own)
            wrong = any(expected.get(line.step) != line.digest for line in own)
            if wrong or {line.step for line in own} != {*expected}:
                bad.add(name)
    return OutcomeCheck(
        "the weights after every step are those of an uninterrupted run", steps > 0 and not bad,
        f"{steps} steps of {len(course.lines)} trainings" if not bad else ", ".join(sorted(bad)),
    )  # fmt: skip


def _held_once(course: LendingCourse) -> OutcomeCheck:
    """Checks that no GPU was used by two tasks at the same time."""
    uses: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for ranks in course.lines.values():
        for rank in ranks:
            for attempt in {line.attempt for line in rank}:
                own = [line for line in rank if line.attempt == attempt]
                uses.setdefault((own[0].machine, own[0].gpu), []).append((own[0].at_s, own[-1].at_s))
    clashes = sum(end > begin for spans in uses.values() for (_, end), (begin, _) in pairwise(sorted(spans)))
    return OutcomeCheck(
        "no GPU was used by two tasks at the same time", clashes == 0, f"{len(uses)} GPUs, {clashes} times"
    )
