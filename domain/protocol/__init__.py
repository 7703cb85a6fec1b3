"""Names and payloads of the messages between workflows, activities, agents and the outbox.

Payloads contain only references and small values. Plans, snapshots, specifications and secrets are never stored in
Temporal's history.
"""

from domain.protocol.activities import (
    Activity,
)
from domain.protocol.data import (
    NIGHTLY,
    ON_DEMAND,
    ReplicateTable,
    Scrub,
)
from domain.protocol.instances import (
    InstanceFacts,
    InstanceInput,
    InstanceMove,
    InstanceRef,
)
from domain.protocol.machines import (
    DETACHED,
    MAX_RUNS,
    Attend,
    Hello,
    MachineNotice,
    NodeHeartbeat,
    NodeOutcome,
    NodePrepared,
    Pace,
    PrepareNode,
    ProveKey,
    RunNode,
    RunPace,
    StopNode,
    TaskExit,
    Welcome,
)
from domain.protocol.mail import (
    Mail,
    MailKind,
)
from domain.protocol.scheduling import (
    AwardRequest,
    AwardResult,
    BidRequest,
    DryRunRequest,
    DryRunResult,
    ScanTicket,
)
from domain.protocol.services import (
    ServiceRef,
    ServiceStep,
)
from domain.protocol.workloads import (
    TASKS_MAY_RUN,
    CheckpointCopy,
    FlushedRequest,
    LaunchPlan,
    NodeLaunch,
    ReleaseRequest,
    StageRequest,
    TransitionRequest,
    WorkloadInput,
)

__all__ = [
    "DETACHED",
    "MAX_RUNS",
    "NIGHTLY",
    "ON_DEMAND",
    "TASKS_MAY_RUN",
    "Activity",
    "Attend",
    "AwardRequest",
    "AwardResult",
    "BidRequest",
    "CheckpointCopy",
    "DryRunRequest",
    "DryRunResult",
    "FlushedRequest",
    "Hello",
    "InstanceFacts",
    "InstanceInput",
    "InstanceMove",
    "InstanceRef",
    "LaunchPlan",
    "MachineNotice",
    "Mail",
    "MailKind",
    "NodeHeartbeat",
    "NodeLaunch",
    "NodeOutcome",
    "NodePrepared",
    "Pace",
    "PrepareNode",
    "ProveKey",
    "ReleaseRequest",
    "ReplicateTable",
    "RunNode",
    "RunPace",
    "ScanTicket",
    "Scrub",
    "ServiceRef",
    "ServiceStep",
    "StageRequest",
    "StopNode",
    "TaskExit",
    "TransitionRequest",
    "Welcome",
    "WorkloadInput",
]
