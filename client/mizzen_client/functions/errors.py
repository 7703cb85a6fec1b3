"""Errors of calls that run as workloads."""


class RemoteTraceback(Exception):
    """The cause of an exception that a function raised in a task: its text is the traceback there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class RemoteError(Exception):
    """A function raised an exception that cannot be pickled. The text is its traceback."""


class CallFailed(Exception):
    """A call ended without an outcome of its function, for example because its task was killed."""

    def __init__(self, message: str, workload: str) -> None:
        super().__init__(message, workload)
        self.workload = workload
        """The id of the workload, or of the element of an array."""

    def __str__(self) -> str:
        return str(self.args[0])
