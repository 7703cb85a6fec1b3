"""`JobEnvironment`, from which a function reads its rank and the size of its job. Needs only the standard library."""

import os
import socket

from mizzen.environment import TaskEnvironment


class JobEnvironment:
    """The rank of a task and the size of its job, with submitit's names.

    Raises:
        RuntimeError: this process is not a task of mizzen.
    """

    def __init__(self) -> None:
        own = TaskEnvironment.from_environ()
        if own.workload is None:
            raise RuntimeError("MIZZEN_WORKLOAD is not set: this process is not a task of mizzen")
        self.cluster = "mizzen"
        self.hostname = socket.gethostname()
        self.job_id = self.raw_job_id = own.workload
        """The id of the workload, or of the element of an array."""
        self.array_job_id = os.environ.get("MIZZEN_ARRAY_ID")
        self.array_task_id = os.environ.get("MIZZEN_ARRAY_INDEX")
        self.num_tasks, self.global_rank = own.world_size, own.rank
        self.num_nodes, self.node, self.local_rank = own.gang_machines or 1, own.node_rank, own.local_rank

    def activated(self) -> bool:
        """Return whether this process is a task of mizzen."""
        return True
