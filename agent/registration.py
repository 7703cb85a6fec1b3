"""Registers the machine with its workflow in Temporal, and sends the machine's notices to that workflow."""

import asyncio
import contextlib
import logging
import time
from datetime import timedelta

from temporalio.client import Client

from agent import sealed
from agent.activities import NodeActivities
from agent.config import AgentConfig
from agent.gpu_watch import GpuWatch
from agent.lending.lender import Lender
from agent.notices import MachineNotices
from agent.state import StateFolder
from domain.ids import CONTROL_QUEUE, machine_workflow_id
from domain.protocol.machines import Hello

MACHINE_WORKFLOW = "MachineWorkflow"
HELLO_SIGNAL = "hello"
NOTICED_SIGNAL = "noticed"
_HANDOVER_S = 3.0
"""Time that the machine's workflow needs to start the next `machine.attend` activity after one has ended."""
_FORWARD_AGAIN_S = 0.5
"""Pause after a notice that could not be sent."""
_LONGEST_PAUSE_S = 3600.0
"""Longest pause between two repetitions of a notice."""
_FIRST = asyncio.FIRST_COMPLETED
_log = logging.getLogger(__name__)


async def say_hello(client: Client, config: AgentConfig, state: StateFolder, lender: Lender, gpus: GpuWatch) -> None:
    """Sends the machine's registration to its workflow, which is started if it does not run.

    Raises:
        RPCError: Temporal cannot be reached, or refuses the request.
    """
    hello = Hello(
        machine=config.machine,
        region=config.region,
        cluster=config.cluster,
        rack=config.rack,
        gpu_type=config.gpu_type,
        gpus=config.gpus,
        cpus_milli=config.cpus_milli,
        memory_bytes=config.task_memory_bytes,
        address=config.address,
        incarnation=state.incarnation(),
        public_key=sealed.public_key(state.private_key()),
        runs=state.running(),
        instance=config.instance,
        join_token=config.join_token,
        native_id=config.native_id,
        at_s=time.time(),
        taken=lender.lending.is_whole,
        withheld=lender.lending.withheld,
        isolation=config.isolation.value,
        isolation_why=config.isolation_why,
        engine=config.engine,
        word_at_s=lender.lending.said_at_s,
        gpu_fault=gpus.fault,
        unfreed=gpus.unfreed,
    )
    await client.start_workflow(
        MACHINE_WORKFLOW,
        config.machine,
        id=machine_workflow_id(config.machine),
        task_queue=CONTROL_QUEUE,
        start_signal=HELLO_SIGNAL,
        start_signal_args=[hello],
        static_summary=f"machine {config.machine}",
        rpc_timeout=timedelta(seconds=10),
    )


async def stay_registered(
    client: Client,
    config: AgentConfig,
    state: StateFolder,
    activities: NodeActivities,
    lender: Lender,
    gpus: GpuWatch,
) -> None:
    """Registers the machine again while no `machine.attend` runs: its workflow may be lost or missed the registration.

    Repeats every `hello_interval_s`, and soon after a `machine.attend` has ended: it ends, for example, if the machine
    was disconnected for so long that it was declared lost. Also registers it at once when the owner takes GPUs back or
    lends them again, and when a GPU has failed or its memory is not free at the end of an attempt.
    """
    said = (lender.lending.is_whole, lender.lending.withheld, gpus.fault, gpus.unfreed)
    while True:
        changes = (activities.let_go, lender.changed, gpus.changed)
        let_go, *changed = [asyncio.ensure_future(event.wait()) for event in changes]
        done, pending = await asyncio.wait({let_go, *changed}, timeout=config.hello_interval_s, return_when=_FIRST)
        for waiting in pending:
            waiting.cancel()
        if let_go in done:
            activities.let_go.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_HANDOVER_S, config.hello_interval_s)):
                    await lender.changed.wait()
        # Resources that were taken and lent again since the last hello must be reported: the notice may have been sent.
        has_changed = lender.changed.is_set()
        lender.changed.clear()
        gpus.changed.clear()
        now = (lender.lending.is_whole, lender.lending.withheld, gpus.fault, gpus.unfreed)
        if activities.attending == 0 or has_changed or now != said:
            if lender.lending.is_whole:
                # Send the notice first: the machine's workflow handles a hello before it, and would wait for the closed
                # polls.
                await lender.polls.until_known()
            try:
                await say_hello(client, config, state, lender, gpus)
                said = now
            except Exception as error:
                _log.warning("%s: registration failed: %s", config.machine, error)


async def forward_notices(
    client: Client, config: AgentConfig, state: StateFolder, notices: MachineNotices, lender: Lender
) -> None:
    """Signals new notices to the machine's workflow at once, and repeats them while they apply.

    The repetition reaches a workflow that was replaced. Its interval doubles each time, because each signal adds events
    to the workflow's history.
    """
    workflow = client.get_workflow_handle(machine_workflow_id(config.machine))
    pause_s = config.hello_interval_s
    while True:
        try:
            async with asyncio.timeout(pause_s):
                await notices.heard.wait()
            pause_s = config.hello_interval_s
        except TimeoutError:
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        notices.heard.clear()
        try:
            told = notices.all(config.machine, state.incarnation())
            for notice in told:
                await workflow.signal(NOTICED_SIGNAL, notice, rpc_timeout=timedelta(seconds=10))
            if lender.lending.is_whole and any(notice.run is None for notice in told):
                lender.polls.known()
        except Exception as error:
            _log.warning("%s: cannot send a notice to the machine's workflow, retrying: %s", config.machine, error)
            await asyncio.sleep(_FORWARD_AGAIN_S)
            notices.heard.set()
