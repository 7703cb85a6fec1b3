"""Prepares, runs and stops the tasks of a gang through the agents of its machines."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.addresses import HOST_RULE, is_host, is_port
    from domain.blame import Blame, LaunchError, verdict
    from domain.lifecycle.gangs import GangEnd, LaunchFailure, TaskFailure
    from domain.lifecycle.launch_limits import LONGEST_S
    from domain.protocol.activities import Activity
    from domain.protocol.leases import ElementResult
    from domain.protocol.machines import NodeOutcome, NodePrepared, PrepareNode, RunNode, StopNode, TaskExit
    from domain.protocol.workloads import LaunchPlan, NodeLaunch
    from domain.reasons import Reason, ReasonCode
    from domain.task_reports import OWNER, TaskProgress
    from workflows.activity_calls import give_up, stop_node

_RUN_S = 3650 * 86400.0
_TIMED_OUT = "TemporalTimeout:StartToClose"
"""Temporal's name of a start-to-close timeout in `non_retryable_error_types`."""
_WITHDRAWN_S = 5.0
"""How long to wait for the end of a withdrawn launch before its agent is asked to stop the tasks."""
_SHOWN = 200
"""Maximum length of an agent's value in messages, in characters."""
_FAILURE_GRACE_S = 10.0
"""The maximum grace of the remaining tasks of a gang after one of its tasks has failed."""


class GangTasks:
    """The tasks of one attempt.

    Call `prepare`, then `start`, and wait for `ended`. `stop` may be called at any time. Call `result` at the end.
    """

    def __init__(self, workload_id: str, attempt: int, plan: LaunchPlan) -> None:
        self._id = workload_id
        self._attempt = attempt
        self._plan = plan
        self._masters: dict[str, str] = {}
        self._runs: dict[str, asyncio.Task[NodeOutcome]] = {}
        self._outcomes: dict[str, NodeOutcome] = {}
        self._finished: list[str] = []
        self._lost: str | None = None
        self._refused: LaunchFailure | None = None
        self._stopping = False
        self._stopped_before = False
        self._withdrawn: set[str] = set()
        self.silent: set[str] = set()
        """Machines whose agents did not confirm that no task runs, so that tasks may still run there."""

    # ---------------------------------------------------------------------------------------------------------- launch

    async def prepare(self) -> LaunchFailure | None:
        """Requests every agent to fetch files and reserve rendezvous ports; returns the failure, if any."""
        answers = await asyncio.gather(*(self._prepare(n) for n in self._plan.nodes), return_exceptions=True)
        failed: LaunchFailure | None = None
        for node, answer in zip(self._plan.nodes, answers, strict=True):
            if isinstance(answer, NodePrepared):
                if (wrong := _wrong_prepared(node, answer)) is None:
                    self._masters |= {job: f"{answer.address}:{answer.ports[job]}" for job in node.leads_jobs}
                else:
                    detail = {"machine": node.machine, "error": wrong}
                    refused = LaunchFailure(Reason(ReasonCode.LAUNCH_FAILED, detail), node.machine)
                    failed = self._worse(failed, refused)
            elif isinstance(answer, ActivityError) and _stopped_before(answer):
                self._stopped_before = True
            elif isinstance(answer, ActivityError):
                failed = self._worse(failed, self._why_not_started(node.machine, answer))
            elif isinstance(answer, BaseException):
                raise answer
        return failed

    async def fetch_images(self) -> None:
        """Requests every agent to fetch the images of its tasks. `prepare` finds out what could not be fetched."""
        fetches = (self._prepare(node, only_images=True) for node in self._plan.nodes)
        await asyncio.gather(*fetches, return_exceptions=True)

    async def _prepare(self, node: NodeLaunch, *, only_images: bool = False) -> NodePrepared:
        prepared: NodePrepared = await workflow.execute_activity(
            Activity.PREPARE_NODE.value,
            PrepareNode(
                self._id,
                self._attempt,
                node.machine,
                self._plan.launch_key,
                self._plan.bucket_url,
                node.leads_jobs,
                self._plan.launch_sha256,
                only_images,
            ),
            task_queue=ids.agent_queue(node.machine),
            result_type=NodePrepared,
            schedule_to_start_timeout=timedelta(seconds=self._plan.node_lost_after_s),
            start_to_close_timeout=timedelta(seconds=self._limit_s(node.machine) or LONGEST_S),
            heartbeat_timeout=timedelta(seconds=self._plan.heartbeat_timeout_s),
            # The limit covers all tries together: a machine that has used it up gets no second one.
            retry_policy=RetryPolicy(maximum_attempts=3, non_retryable_error_types=[_TIMED_OUT]),
        )
        return prepared

    def _limit_s(self, machine: str) -> float | None:
        """Returns how long the preparation may take on a lent machine; None: the machine is not lent, so no limit."""
        return self._plan.launch_limit_s if self._is_lent(machine) else None

    def _is_lent(self, machine: str) -> bool:
        return any(n.machine == machine and n.lent for n in self._plan.nodes)

    def _why_not_started(self, machine: str, error: ActivityError) -> LaunchFailure:
        kind = error.cause.type if isinstance(error.cause, ApplicationError) else None
        if isinstance(error.cause, TimeoutError):
            if error.cause.type != TimeoutType.START_TO_CLOSE:
                return LaunchFailure(Reason(ReasonCode.MACHINE_LOST, {"machine": machine}), machine)
            if (limit_s := self._limit_s(machine)) is not None:
                late = {"machine": machine, "limit_s": round(limit_s, 1), "avoided": [machine]}
                return LaunchFailure(Reason(ReasonCode.LAUNCH_TIMED_OUT, late), machine, timed_out=True)
            kind = LaunchError.TOO_SLOW
        detail = {"machine": machine, "error": str(error.cause or error)[:500]}
        blame = verdict(kind).blame
        code = ReasonCode.CANNOT_START if blame is Blame.WORKLOAD else ReasonCode.LAUNCH_FAILED
        blamed = machine if blame is Blame.MACHINE else None
        lent = machine if self._is_lent(machine) else None
        return LaunchFailure(Reason(code, detail), blamed, blame is Blame.WORKLOAD, lent)

    @staticmethod
    def _worse(known: LaunchFailure | None, other: LaunchFailure) -> LaunchFailure:
        """Returns which failure to report: a failure that blames the workload, else the earlier one.

        Failures on lent machines that blame the workload are confirmed by such a failure on a machine that is not lent,
        or on a second lent machine.
        """
        if known is None or (other.blames_workload and not known.blames_workload):
            return other
        if not other.blames_workload or known.lent is None or other.lent == known.lent:
            return known
        return other if other.lent is None else replace(known, lent=None)

    @property
    def stopped_before(self) -> bool:
        """Whether an agent has already stopped this attempt for an earlier workflow of the workload."""
        return self._stopped_before

    def start(self) -> None:
        """Starts the tasks of every node, with one long activity for each node."""
        for node in self._plan.nodes:
            self._runs[node.machine] = asyncio.ensure_future(self._run(node))

    async def _run(self, node: NodeLaunch) -> NodeOutcome:
        machine, plan = node.machine, self._plan
        leads = node.leads_jobs if plan.starts_at_once else None
        try:
            outcome: NodeOutcome = await workflow.execute_activity(
                Activity.RUN_NODE.value,
                RunNode(
                    self._id,
                    self._attempt,
                    machine,
                    plan.launch_key,
                    plan.bucket_url,
                    self._masters,
                    plan.launch_sha256,
                    leads,
                ),
                task_queue=ids.agent_queue(machine),
                result_type=NodeOutcome,
                # After a missed heartbeat, the activity is retried on the same machine: an agent that returns
                # re-attaches to its tasks. A machine whose agent does not return is lost.
                schedule_to_start_timeout=timedelta(seconds=plan.node_lost_after_s),
                start_to_close_timeout=timedelta(seconds=_RUN_S),
                heartbeat_timeout=timedelta(seconds=plan.heartbeat_timeout_s),
                # A launch that is withdrawn after its start still returns how the tasks ended.
                cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                retry_policy=RetryPolicy(
                    initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(seconds=5)
                ),
            )
        except ActivityError as error:
            outcome = NodeOutcome(machine=machine, exits=[], progress=[], stopped=True)
            if machine in self._withdrawn and isinstance(error.cause, CancelledError):
                return outcome  # The outcome is only known after a stop.
            if machine in self._outcomes:
                return outcome  # A stop has already returned the outcome.
            if _stopped_before(error):
                self._stopped_before = True
            elif isinstance(error.cause, ApplicationError):
                self._refused = self._worse(self._refused, self._why_not_started(machine, error))
            else:
                self._lost = self._lost or machine
                self.silent.add(machine)
        self._keep(machine, outcome)
        self._finished.append(machine)
        return outcome

    def _keep(self, machine: str, outcome: NodeOutcome) -> None:
        """Stores how the tasks on a machine ended: the first answer, to the run or to the stop, that has exit codes.

        An agent that was restarted refuses the run of an attempt that it has stopped, and this refusal may arrive after
        the answer to the stop.
        """
        earlier = self._outcomes.get(machine)
        if earlier is None or not earlier.exits:
            self._outcomes[machine] = outcome

    # ------------------------------------------------------------------------------------------------------------- end

    @property
    def ended(self) -> bool:
        """Whether all nodes have ended, or one has failed or is lost, so that the remaining nodes must be stopped."""
        if len(self._finished) == len(self._plan.nodes):
            return True
        return self._lost is not None or any(not self._outcomes[m].succeeded for m in self._finished)

    @property
    def still_running(self) -> list[str]:
        """The machines that have not reported an end, sorted."""
        return sorted({n.machine for n in self._plan.nodes} - self._outcomes.keys())

    @property
    def noticed(self) -> Reason | None:
        """The platform notice of the first machine that ended unsuccessfully and had one; None: there is none."""
        for machine in self._order():
            notice = self._outcomes[machine].notice
            if notice is not None and not self._outcomes[machine].succeeded:
                return Reason(ReasonCode.PLATFORM_NOTICE, {"machine": machine, **notice.numbers()})
        return None

    @property
    def elements(self) -> list[ElementResult]:
        """What a runner's machine reported about array elements when the runner ended."""
        return [one for outcome in self._outcomes.values() for one in outcome.elements]

    async def stop(self, grace_s: float, lost: str | None = None, *, ends: bool = False) -> None:
        """Stops the tasks of every node and waits until none runs. `lost` is a machine that is known to be gone.

        `ends`: the workload ends with these tasks.
        """
        self._stopping = True
        self._lost = self._lost or lost
        if lost is not None:
            self.silent.add(lost)
        asked = [n.machine for n in self._plan.nodes if n.machine != self._lost and not self._is_given_back(n.machine)]
        await asyncio.gather(*(self._stop(machine, grace_s, ends) for machine in asked))

    def withdraw(self, machine: str) -> None:
        """Withdraws the launch on a machine that its owner has taken. A `stop` must follow.

        If the agent has not received the launch, it never does. Otherwise the agent ends the tasks by itself, and the
        launch returns their outcome.
        """
        if machine in self._runs and machine not in self._outcomes:
            self._withdrawn.add(machine)
            give_up(self._runs[machine])

    def _is_given_back(self, machine: str) -> bool:
        """Returns whether the agent has reported the end of all tasks on a machine that its owner takes.

        The agent starts nothing more there, and its polls may be closed.
        """
        outcome = self._outcomes.get(machine)
        return bool(outcome and outcome.exits and outcome.notice and outcome.notice.platform == OWNER)

    async def _stop(self, machine: str, grace_s: float, ends: bool) -> None:
        if machine in self._withdrawn:
            with suppress(asyncio.TimeoutError):
                await workflow.wait_condition(self._runs[machine].done, timeout=_WITHDRAWN_S)
            if self._is_given_back(machine):
                return
        try:
            outcome = await stop_node(
                machine,
                StopNode(self._id, self._attempt, grace_s, ends),
                lost_after_s=self._plan.node_lost_after_s,
                heartbeat_timeout_s=self._plan.heartbeat_timeout_s,
            )
        except ActivityError:
            # The agent is silent or answers with a failure, so it is unknown whether its tasks still run.
            self._lost = self._lost or machine
            self.silent.add(machine)
            return
        self.silent.discard(machine)
        self._keep(machine, outcome)

    async def result(self) -> GangEnd:
        """Returns how the gang ended. If a task failed or a machine was lost, stops the remaining tasks first."""
        if self._runs and not self._stopping:
            if not all(n.machine in self._outcomes for n in self._plan.nodes):
                await self.stop(min(self._plan.grace_s, _FAILURE_GRACE_S))
            elif not all(o.succeeded for o in self._outcomes.values()):
                # All nodes have ended, but the loss of a machine often shows first as failures of its peers. A stop
                # request to each node finds a lost machine.
                await self.stop(0.0)
        for run in self._runs.values():
            give_up(run)
        good = bool(self._outcomes) and all(o.succeeded for o in self._outcomes.values())
        exits = [(m, e) for m in self._order() for e in self._outcomes[m].exits]
        failed = any(not o.stopped and not o.succeeded for o in self._outcomes.values())
        lost = self._lost or next((m for m, e in exits if e.exit_code is None and e.signal is None), None)
        progress = tuple(p for m in self._order() for p in self._own_progress(m))
        ended = any(o.exits and not o.stopped for o in self._outcomes.values())
        return GangEnd(
            all_succeeded=good and lost is None,
            lost_machine=lost,
            first_failure=self._first_failure(exits),
            refused=None if failed else self._refused,
            stopped_before=self._stopped_before and not failed,
            failed=failed,
            noticed=self.noticed,
            reported=ended or any(p.step is not None or p.checkpoint_step is not None for p in progress),
            progress=progress,
        )

    def _own_progress(self, machine: str) -> list[TaskProgress]:
        """Returns the progress that a machine has reported, limited to tasks that are placed on it."""
        reported = self._outcomes[machine].progress
        placed = next(n.tasks for n in self._plan.nodes if n.machine == machine)
        return [p for p in reported if p.task in placed.get(p.job, ())]

    def _order(self) -> list[str]:
        """Returns the machines that ended by themselves, in the order of their ends, then the stopped machines."""
        return [*self._finished, *sorted(m for m in self._outcomes if m not in self._finished)]

    @staticmethod
    def _first_failure(exits: list[tuple[str, TaskExit]]) -> TaskFailure:
        bad = [(machine, e) for machine, e in exits if not e.succeeded]

        # A task that runs out of memory or disk space makes its peers fail, so it comes first, and then a task that did
        # not become ready in time. A task with an exit code of its own is more informative than the tasks that were
        # stopped because of it.
        def order(pair: tuple[str, TaskExit]) -> tuple[bool, ...]:
            end = pair[1]
            no_cause = (end.memory_limit_bytes is None, end.disk is None, end.not_ready is None)
            return (*no_cause, end.exit_code in (None, 143))

        bad.sort(key=order)
        if not bad:
            return TaskFailure("?", "an unknown status")
        machine, first = bad[0]
        memory = None
        if first.memory_limit_bytes is not None:
            memory = {"limit_bytes": first.memory_limit_bytes, "peak_bytes": first.memory_peak_bytes or 0}
        return TaskFailure(
            f"{first.job}/{first.task}",
            first.status,
            memory,
            first.in_setup,
            first.not_ready,
            first.disk,
            machine,
            max(0, first.restarts),  # A volunteer's agent may report any number.
        )


def _wrong_prepared(node: NodeLaunch, answer: NodePrepared) -> str | None:
    """Returns the error in an agent's answer to `prepare`, which the tasks on all machines would use; None: none.

    A volunteer's agent may answer anything, for example with ports of jobs that other machines lead.
    """
    if not is_host(answer.address):
        return f"address: {answer.address[:_SHOWN]!r}: must be {HOST_RULE}"
    if answer.ports.keys() != set(node.leads_jobs):
        return f"ports: of jobs {sorted(answer.ports)!r:.{_SHOWN}}: must be of {sorted(node.leads_jobs)}"
    wrong = next((job for job, port in sorted(answer.ports.items()) if not is_port(port)), None)
    return None if wrong is None else f"ports[{wrong!r}]: {answer.ports[wrong]}: must be from 1 to 65535"


def _stopped_before(error: ActivityError) -> bool:
    """Returns whether an agent refused the attempt because it has already stopped it."""
    return isinstance(error.cause, ApplicationError) and error.cause.type == LaunchError.STOPPED_ATTEMPT
