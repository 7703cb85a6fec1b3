"""Parts of workload documents."""

from typing import Any

from tests.api.world import document

JOB = document()["jobs"][0]


def job(**changes: Any) -> dict[str, Any]:
    """Returns the example document with changes in its job; None removes a key."""
    return document(jobs=[{k: v for k, v in {**JOB, **changes}.items() if v is not None}])


def resources(**changes: Any) -> dict[str, Any]:
    """Returns the example document with changes in the resources of its job."""
    return job(resources={**JOB["resources"], **changes})
