"""One training of `rigs.crash.kill_loop`: starts, kills and freezes its processes, and checks the invariants
afterwards.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rigs.crash.kill_arena import Arena, ArenaViolation, Variant, children, place_name
from rigs.crash.kill_process import Process
from rigs.crash.kill_training import KillJob, SaveStage, Table, expected, ranks
from rigs.crash.kill_watch import Seen, look

FREEZES = 6
"""One in `FREEZES` interruptions of a training with a single process is a freeze."""
MOVES = 6
"""One in `MOVES` restarts of a training with two roots is on the other machine; one in three of these is new."""
ALL_CALLS = 1 << 62


class KillRun:
    """One training, from its beginning to its end."""

    def __init__(self, arena: Arena, variant: Variant, seed: int, enough: Callable[[], bool]) -> None:
        self.arena, self.variant, self.enough = arena, variant, enough
        rng = arena.rng
        base = replace(
            arena.job,
            seed=seed,
            root=arena.new_root(),
            keep=variant.keep,
            every=rng.choice((1, 2, 3)),
            background=variant.background,
            by_step=variant.by_step,
            world_size=variant.world_size,
        )
        self.base = base
        self.machines = [str(arena.folder / f"local-{seed}-{n}") for n in range(2)] if variant.local else []
        self.machine = 0
        self.launched = 0
        self.acknowledged = 0
        self.freezes = self.unpruned = 0
        both = [expected(job) for job in ranks(base)]
        self.tables: list[Table] = [table for table, _ in both]
        self.digests = [digest for _, digest in both]

    def jobs(self, **changes: Any) -> list[KillJob]:
        """Returns the jobs of the next attempt, one per rank."""
        self.launched += 1
        attempt = self.launched if self.variant.numbered else None
        local = self.machines[self.machine] if self.machines else None
        return [replace(job, attempt=attempt, local=local, **changes) for job in ranks(self.base)]

    def look(self) -> list[tuple[str, Seen]]:
        """Reads the roots that the next attempt uses; the remote one is last.

        Raises:
            Violation: a root has an invalid record, checkpoint or object.
        """
        roots = [self.machines[self.machine]] if self.machines else []
        seen = [(root, look(root, self.tables)) for root in [*roots, self.base.root]]
        for root, one in seen:
            self.arena.tally.most_empty_folders = max(self.arena.tally.most_empty_folders, one.empty_folders)
            if one.wrong:
                raise ArenaViolation(f"{root}: {'; '.join(one.wrong)}")
        return seen

    def resume_step(self) -> int:
        """Returns the step from which the next attempt must resume.

        Raises:
            Violation: an acknowledged save is lost.
        """
        newest = [seen.newest for _, seen in self.look()]
        step = max(((commit.order, commit.step) for commit in newest if commit), default=((0, 0), 0))[1]
        if step < self.acknowledged:
            raise ArenaViolation(
                f"step {self.acknowledged} was acknowledged, but the newest checkpoint has step {step}"
            )
        return step

    def finish(self) -> None:
        """Kills and restarts the training until it has finished.

        Raises:
            Violation: an invariant does not hold.
            ProcessTimeout: a process did not make progress within the timeout.
        """
        turn = 0
        while True:
            step = self.resume_step()
            if self.machines and turn and self.arena.rng.randrange(MOVES) == 0:
                step = self._move()
            turn += 1
            if self.arena.freezes and self._freezable(turn) and self.arena.rng.randrange(FREEZES) == 0:
                done = Freeze(self, step).done()
            else:
                done = self._attempt(step)
            if done:
                break
        self._all_done()
        self.arena.tally.trainings += 1

    def _all_done(self) -> None:
        if any(seen.loose for _, seen in self.look()):
            # Loose parts are removed only by a process that has loaded a checkpoint: not if the first save was killed,
            # and a frozen process that commits too late removes its record, but not its parts.
            with children([Process(job) for job in self.jobs()]) as processes:
                self.met(processes, self.base.steps)
        roots = self.look()
        # If the kill came between the two roots of the last save, the restart finds all steps done and saves nothing.
        steps = [seen.newest.step if seen.newest else 0 for _, seen in roots]
        if max(steps) != self.base.steps:
            raise ArenaViolation(f"the training has finished, but the newest checkpoints have steps {steps}")
        for root, seen in roots:
            if seen.loose_before(max(attempt for _, attempt in seen.claims)) if seen.claims else seen.loose:
                raise ArenaViolation(f"{root}: loose objects at the end: {seen.loose}")
            # A process that was frozen before its first write and resumed too late leaves one more checkpoint for the
            # next save to remove. So does a process that was killed between a commit and the removals after it.
            most = self.variant.keep + self.freezes + self.unpruned
            if len(seen.commits) > most or len(seen.claims) > self.launched:
                raise ArenaViolation(
                    f"{root}: too many records remain: {len(seen.commits)} checkpoints, {len(seen.claims)} claims"
                )

    def _freezable(self, turn: int) -> bool:
        return self.variant.world_size == 1 and turn > 1 and not self.enough()

    def _move(self) -> int:
        """Moves the training to the other machine; one in three times, this machine is new, with an empty root."""
        self.machine = 1 - self.machine
        if self.arena.rng.randrange(3) == 0:
            shutil.rmtree(self.machines[self.machine], ignore_errors=True)
        return self.resume_step()

    def heard(self, processes: Sequence[Process]) -> None:
        """Processes the lines of ended processes.

        Raises:
            Violation: a process has reported one.
        """
        for process in processes:
            process.hear()
            self.acknowledged = max([self.acknowledged, *(int(step) for step in process.told("done"))])
            for words in process.told("violation"):
                raise ArenaViolation(f"rank {process.job.rank}, attempt {process.job.attempt}: {words}")

    def met(self, processes: Sequence[Process], step: int) -> None:
        """Waits until all ranks have claimed and loaded, and checks their step and the sweep.

        Raises:
            Violation: a rank resumes from the wrong step, or loose objects of older attempts remain.
        """
        for process in processes:
            if not process.wait_line("restored"):
                self.heard([process])
                raise ArenaViolation(f"a restart ended with status {process.status}; its lines: {process.lines}")
            told = int(process.told("restored")[0])
            # The server may have completed a request of a killed process after the root was read.
            if told != step and told != self.resume_step():
                raise ArenaViolation(
                    f"rank {process.job.rank} resumes from step {told}, but must resume from step {step}"
                )
        self.heard(processes)
        self.arena.tally.restarts += 1
        for root, seen in self.look():
            # If attempts are not numbered by the supervisor, the two roots may number them differently.
            claimed = max(attempt for _, attempt in seen.claims)
            if step and (loose := seen.loose_before(claimed)):
                raise ArenaViolation(f"{root}: attempt {claimed} has claimed, but loose objects remain: {loose}")

    def _attempt(self, step: int) -> bool:
        """Runs one attempt, usually with a kill; returns whether the training has finished."""
        rng, name = self.arena.rng, self.variant.name
        measured = self.arena.calls.keys()
        if self.enough():
            how = "none"
        elif (name, "save") not in measured:
            how = "save, calls"
        elif (name, "start") not in measured:
            how = "start, calls"
        else:
            how = rng.choices(("start, time", "start, calls", "any time", "save, calls"), (12, 18, 25, 45))[0]
        victim = rng.randrange(self.variant.world_size)
        arm = {"start, calls": 0, "save, calls": rng.choice((1, 1, 2, 3))}.get(how)
        jobs = self.jobs(settle=how == "save, calls" and (name, "save") not in measured)
        jobs[victim] = replace(jobs[victim], arm=arm)
        began_s = time.monotonic()
        with children([Process(job) for job in jobs]) as processes:
            if how.startswith("start"):
                self._at_start(processes, victim, how, began_s)
            else:
                self.met(processes, step)
                self.arena.seconds.setdefault((name, "start"), time.monotonic() - began_s)
                self._later(processes, victim, how)
            for process in processes:
                process.wait()
            self.heard(processes)
            return self._counted(processes, how, step)

    def _counted(self, processes: Sequence[Process], how: str, step: int) -> bool:
        tally = self.arena.tally
        killed = [process for process in processes if process.killed]
        for process in processes:
            if not process.killed and process.status != 0:
                raise ArenaViolation(f"rank {process.job.rank} ended with status {process.status}, but was not killed")
            if not process.killed and process.told("finished") != [self.digests[process.job.rank]]:
                raise ArenaViolation(
                    f"rank {process.job.rank} ended with {process.lines[-1:]}, but the state of an uninterrupted run "
                    f"has SHA-256 {self.digests[process.job.rank]}"
                )
        if killed:
            tally.kills += 1
            tally.processes += len(killed)
            tally.hows[how] += 1
            for process in killed:
                tally.places[process.stage] += 1
            # A process reports a stage shortly before it begins.
            late = (
                SaveStage.RECORD,
                SaveStage.COMMITTED,
                SaveStage.REMOVAL,
                SaveStage.ENDED,
                SaveStage.TRAINING,
                SaveStage.MEETING,
            )
            self.unpruned += any(process.stage[0] in late for process in killed)
            self.arena.tell(
                {
                    "kill": tally.kills,
                    "variant": self.variant.name,
                    "seed": self.base.seed,
                    "how": how,
                    "places": [place_name(*process.stage) for process in killed],
                    "resumed_step": step,
                    "acknowledged_step": self.acknowledged,
                }
            )
        return not killed

    def _at_start(self, processes: Sequence[Process], victim: int, how: str, began_s: float) -> None:
        """Kills the ranks during claim, sweep or load, before any rank trains."""
        rng, key = self.arena.rng, (self.variant.name, "start")
        one = processes[victim]
        for process in processes:
            if process is not one:
                process.go()
        if how == "start, time":
            one.go()
            until_s = 1.3 * self.arena.seconds[key]
        else:
            one.wait_line("began")
            one.go()  # For its second wait, which is after the load.
            others = [process for process in processes if process is not one]
            known = self.arena.calls.get(key)
            calls = rng.randint(1, known) if known else ALL_CALLS
            made = one.kill_at(calls, others, lambda: known is None and one.stage[0] is SaveStage.TRAINING)
            self.arena.calls.setdefault(key, made)
            until_s = 0.5 * self.arena.seconds[key]
        self._kill_all(processes, until_s, began_s)

    def _later(self, processes: Sequence[Process], victim: int, how: str) -> None:
        """Kills the ranks during training and saves."""
        rng, key = self.arena.rng, (self.variant.name, "save")
        one = processes[victim]
        began_s = time.monotonic()
        for process in processes:
            process.go()
        if how == "none":
            return
        if how == "save, calls" and one.wait_line("save", one.job.arm or 1):
            others = [process for process in processes if process is not one]
            known = self.arena.calls.get(key)
            if known is None:
                started_s = time.monotonic()
                made = one.kill_at(ALL_CALLS, others, lambda: one.stage[0] is SaveStage.TRAINING)
                self.arena.calls[key] = made
                self.arena.seconds[key] = time.monotonic() - started_s
            else:
                # One eighth more than a save has, so that the time between two saves is hit too.
                one.kill_at(rng.randint(1, known + known // 8), others)
        self._kill_all(processes, 3 * self.arena.seconds[key], began_s)

    def _kill_all(self, processes: Sequence[Process], within_s: float, began_s: float) -> None:
        """Kills the processes that still run, each after its own random time."""
        rng = self.arena.rng
        times = sorted(
            ((rng.uniform(0, within_s), process.job.rank, process) for process in processes), key=lambda t: t[:2]
        )
        now_s = time.monotonic() if any(process.ended for process in processes) else began_s
        for after_s, _, process in times:
            end_s = now_s + after_s
            while not process.poll() and (left_s := end_s - time.monotonic()) > 0:
                time.sleep(min(left_s, 0.01))
                process.hear()
            process.kill()


class Freeze:
    """A process that is frozen during a save, and continues after its successor has saved."""

    def __init__(self, run: KillRun, step: int) -> None:
        self.run, self.step = run, step

    def done(self) -> bool:
        """Freezes a process and runs its successor; returns whether the training has finished."""
        run, rng = self.run, self.run.arena.rng
        known = run.arena.calls.get((run.variant.name, "save"))
        if known is None:
            return run._attempt(self.step)
        (job,) = run.jobs(arm=rng.choice((1, 2)))
        with children([Process(job)]) as (old,):
            run.met([old], self.step)
            old.go()
            if not old.wait_line("save", job.arm or 1) or not old.freeze_at(rng.randint(1, known)):
                old.wait()
                run.heard([old])
                return run._counted([old], "none", self.step)
            run.heard([old])
            if old.told("finished"):
                # The process was frozen after its work was complete, so nothing can be refused.
                os.kill(old.pid, signal.SIGCONT)
                old.wait()
                return run._counted([old], "none", self.step)
            where = old.stage
            committed = {commit.step for _, seen in run.look() for commit in seen.commits}
            (successor,) = run.jobs(arm=rng.choice((1, 2, 3)), settle=True)
            with children([Process(successor)]) as (new,):
                self._succeed(new)
                before = run.look()
                os.kill(old.pid, signal.SIGCONT)
                old.wait()
                self._refused(old, max(committed, default=0), before)
                run.freezes += 1
                run.arena.tally.freezes += 1
                run.arena.tally.frozen[where] += 1
                run.arena.tell(
                    {"freeze": run.arena.tally.freezes, "variant": run.variant.name, "place": place_name(*where)}
                )
                # The successor continues, until it is killed like any other process.
                new.go()
                run._kill_all([new], 3 * run.arena.seconds[run.variant.name, "save"], time.monotonic())
                run.heard([new])
                return run._counted([new], "any time", self.step)

    def _succeed(self, new: Process) -> None:
        """Lets the successor claim the run, restore and save, up to the save before which it was told to wait."""
        step = self.run.resume_step()
        new.wait_line("restored")
        self.run.heard([new])
        if [str(step)] != new.told("restored"):
            raise ArenaViolation(
                f"the successor of a frozen process resumes from {new.told('restored')}, not from {step}"
            )
        new.go()
        new.wait_line("save", new.job.arm or 1)
        self.run.heard([new])

    def _refused(self, old: Process, committed: int, before: list[tuple[str, Seen]]) -> None:
        """Checks that the frozen process was refused as stale, and did not damage or remove kept checkpoints."""
        old.hear()
        self.run.heard([old])
        # A process that was frozen after the last check of its last save has nothing left that could be refused.
        ended = committed == self.run.base.steps and bool(old.told("finished"))
        if not old.told("stale") and not ended:
            end = f"{old.lines[-3:]}, status {old.status}"
            raise ArenaViolation(f"the commit of a process that a newer one had replaced was accepted: {end}")
        self.run.arena.tally.refused += bool(old.told("stale"))
        if any(int(step) > committed for step in old.told("done")):
            raise ArenaViolation(f"a frozen process had committed {committed}, but acknowledged {old.told('done')[-1]}")
        for (root, was), (_, now) in zip(before, self.run.look(), strict=True):
            # The process may complete removals of old checkpoints that it had begun.
            kept = {commit.number for commit in was.commits[: self.run.variant.keep]}
            gone = kept - {commit.number for commit in now.commits}
            if gone or (was.newest and (now.newest is None or now.newest.order < was.newest.order)):
                raise ArenaViolation(f"{root}: after a freeze, a process removed records {gone}; newest: {now.newest}")
