"""The public names of the SDK's packages. `mizzen` and `mizzen.notices` have separate tests."""

from importlib import import_module

import pytest

PUBLIC = {
    "mizzen.checkpoint": {
        "Checkpoint", "CheckpointError", "CheckpointId", "CheckpointSettings", "CheckpointWarning", "Checkpointer",
        "Checkpoints", "CorruptCheckpointError", "Manifest", "MissingCheckpointError", "Part", "Pickled", "Problem",
        "ResumeError", "Skipped", "StaleAttemptError", "StateError", "StepStatus", "Tiers", "Tracked", "Verification",
        "exit_preempted", "list_committed", "open_checkpoints", "verify_resume",
    },
    "mizzen_client.submitit": {
        "AutoExecutor", "FailedJobError", "Job", "JobEnvironment", "UncompletedJobError", "core", "helpers",
    },
    "mizzen.objects": {"Body", "MissingObject", "ObjectInfo", "ObjectStore", "check_key", "open_store"},
    "mizzen.cadence": {
        "Cadence", "Choice", "Mtbf", "PLATFORMS", "Prior", "UNKNOWN", "best_interval_s", "best_until_end", "choose",
        "expected_time", "expected_time_until_end", "mtbf", "mtbf_of_environ",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names(name: str) -> None:
    """A package has exactly these public names, and each can be imported."""
    package = import_module(name)
    assert set(package.__all__) == PUBLIC[name]
    assert all(hasattr(package, public) for public in PUBLIC[name])
