"""The client's part about the outputs of workloads."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from mizzen_client.calls import Calls
from mizzen_client.views import Output, OutputList


class OutputCalls(Calls):
    """The methods about outputs."""

    def outputs(
        self, workload_id: str, name: str | None = None, job: str | None = None, task: int | None = None
    ) -> list[Output]:
        """Return the outputs of a workload's tasks, sorted by name, job, task and attempt, at most 1000.

        An output that could not be stored has an `error`. `name`, `job` and `task` select outputs.
        """
        params = {"name": name, "job": job, "task": task}
        return cast(OutputList, self._call("GET", "workloads", workload_id, "outputs", params=params))["items"]

    def fetch_output(
        self, workload_id: str, output: Output, folder: Path, progress: Callable[[int], None] | None = None
    ) -> None:
        """Write the files of an output into `folder`, which must not exist, or be empty.

        The folder appears when all files are there. A lost connection is resumed. `progress` is called with the number
        of bytes of the archive that have arrived.

        Raises:
            OutputError: the folder has files, or the output was not stored, or its archive is not valid.
            OSError: the files cannot be written.
        """
        from mizzen_client.output_archive import write_output  # its imports are not needed by most calls

        write_output(self._transport, workload_id, output, folder, progress)
