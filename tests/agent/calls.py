"""Workflows with which tests call the activities of agents, and hear their messages."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy

from domain.ids import agent_queue


@dataclass
class Call:
    """An activity to call on a machine's queue."""

    activity: str
    machine: str
    body: Any
    heartbeat_timeout_s: float
    attempts: int


@workflow.defn(name="AgentTestCall")
class CallWorkflow:
    """Calls one activity and returns what it returned."""

    @workflow.run
    async def run(self, call: Call) -> Any:
        return await workflow.execute_activity(
            call.activity,
            call.body,
            task_queue=agent_queue(call.machine),
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=timedelta(seconds=call.heartbeat_timeout_s),
            retry_policy=RetryPolicy(initial_interval=timedelta(seconds=0.2), maximum_attempts=call.attempts),
        )


@workflow.defn(name="MachineWorkflow")
class HelloWorkflow:
    """Stores the messages that agents send when they start."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []

    @workflow.run
    async def run(self, machine: str) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.signal
    def hello(self, hello: dict[str, Any]) -> None:
        self.heard.append(hello)

    @workflow.signal
    def noticed(self, notice: dict[str, Any]) -> None:
        self.told.append(notice)

    @workflow.query
    def notices(self) -> list[dict[str, Any]]:
        return self.told

    @workflow.query
    def hellos(self) -> list[dict[str, Any]]:
        return self.heard
