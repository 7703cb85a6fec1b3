"""The errors of jobs, where submitit has them: `submitit.core.utils.FailedJobError`."""

from mizzen_client.submitit.job import FailedJobError, UncompletedJobError

__all__ = ["FailedJobError", "UncompletedJobError"]
