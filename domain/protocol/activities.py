"""Names and signatures of the Temporal activities."""

from enum import StrEnum


class Activity(StrEnum):
    """The names under which activities are registered. The comment beside each name is its signature."""

    # On the control queue. Most of these run as local activities in the worker of the calling workflow.
    TRANSITION = "workload.transition"  # TransitionRequest -> bool
    RELEASE = "workload.release"  # ReleaseRequest -> None
    FLUSHED = "workload.flushed"  # FlushedRequest -> None
    LEASE_ELEMENTS = "array.lease"  # LeaseRequest -> list[LeasedElement]
    STAGE = "launch.stage"  # StageRequest -> LaunchPlan
    STAGE_BUNDLE = "bundle.stage"  # Bundle -> dict[str, LaunchPlan]: the plans of the workloads that run
    SETTLE_BUNDLE = "bundle.settle"  # SettleBundle -> None
    STAGED_HERE = "launch.staged_here"  # StageRequest -> None: records that the checkpoints were copied to its region
    SCAN = "queue.scan"  # -> ScanTicket
    AWARD = "queue.award"  # AwardRequest -> AwardResult
    DRY_RUN = "queue.dry_run"  # DryRunRequest -> DryRunResult
    REGISTER_MACHINE = "machine.register"  # Hello -> Welcome
    MACHINE_READY = "machine.ready"  # Attend -> None
    MACHINE_LOST = "machine.lost"  # Attend -> None
    MACHINE_NOTICED = "machine.noticed"  # MachineNotice -> None
    LAUNCH_INSTANCE = "instance.launch"  # InstanceRef -> bool: False if the provider refused
    INSPECT_INSTANCE = "instance.inspect"  # InstanceRef -> InstanceFacts
    MOVE_INSTANCE = "instance.move"  # InstanceMove -> None
    DRAIN_INSTANCE = "instance.drain"  # InstanceRef -> None
    TERMINATE_INSTANCE = "instance.terminate"  # InstanceRef -> bool: True if the provider no longer has the instance
    REFUSE_SESSION = "session.refuse"  # SessionRefusal -> None
    STEP_SERVICE = "service.step"  # ServiceRef -> ServiceStep
    EXPIRE = "house.expire"  # -> float
    REMOVE_REPLICAS = "house.remove_replicas"  # -> float
    OPEN_PLACEMENT_RUN = "placement_run.open"  # PlacementRunRef -> PlacementRunTicket
    PLAN_PLACEMENT_RUN = "placement_run.plan"  # PlacementRunRef -> None
    NEXT_MOVE = "placement_run.next_move"  # NextMove -> MoveOrder
    FINISH_MOVE = "placement_run.finish_move"  # MoveRef -> bool: False if there is more to copy
    PLACEMENT_PAUSED = "placement_run.paused"  # -> bool
    ASSIGN_PARTITIONS = "placement_run.assign_partitions"  # PlacementRunRef -> None
    END_PLACEMENT_RUN = "placement_run.end"  # PlacementRunRef -> None
    # On a region's queue.
    BID = "region.bid"  # BidRequest -> int: plans found
    COPY_CHECKPOINT = "region.copy_checkpoint"  # CheckpointCopy -> int (bytes)
    COPY_TABLE = "region.copy_table"  # ReplicateTable -> int (bytes)
    SCRUB = "region.scrub"  # Scrub -> int: seconds until the next scrub is due
    # On an agent's queue.
    PREPARE_NODE = "node.prepare"  # PrepareNode -> NodePrepared
    RUN_NODE = "node.run"  # RunNode -> NodeOutcome
    RUN_BUNDLE = "node.run_bundle"  # RunBundle -> BundleRun
    STOP_NODE = "node.stop"  # StopNode -> NodeOutcome
    RUN_ELEMENTS = "node.run_elements"  # RunElements -> ElementsRun
    CANCEL_ELEMENTS = "node.cancel_elements"  # CancelElements -> None
    PACE_NODE = "node.pace"  # Pace -> None
    OPEN_SESSION = "node.open_session"  # OpenSession -> None
    PROVE_KEY = "machine.prove_key"  # ProveKey -> str
    ATTEND = "machine.attend"  # Attend -> None; ends only by failure or shutdown
