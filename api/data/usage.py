"""Endpoint that records the table usage of jobs that mizzen does not schedule: Spark, Presto, and other training."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints, model_validator
from sqlalchemy.orm import Session

from api.auth import Operator
from api.bodies import Body, JsonOnly, Line, Name, Read
from api.problems import FieldError, HttpProblem, ProblemType
from api.routing import Router
from api.state import StateOf
from api.views import View, write_audit
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL
from infra.db.reads import unknown_reads
from infra.db.usage import OWN_SOURCE, record_runs

router = Router(prefix="/v1/usage", tags=["data"], dependencies=[JsonOnly])
MAX_RUNS = 1000
MAX_TABLES = 1000
_NAMED = 8
_LARGEST_H = 1e9
_Text = Annotated[Line, StringConstraints(min_length=1)]
_Hours = Annotated[float, Field(ge=0, le=_LARGEST_H, strict=True)]


class RunBody(Body):
    """One run of a job."""

    source: Name = Field(examples=["spark"], description="The reporting system; must not be `mizzen`")
    run: _Text = Field(examples=["application_1700000000000_0042"], description="Id of the run in the source")
    job: _Text = Field(examples=["daily-clicks"], description="Name that all runs of a recurring job share")
    kind: Literal["ml", "spark", "presto"]
    app: Name | None = Field(None, description="App whose quota of CPU hours the run uses; null: the kind")
    tables: list[Read] = Field(
        max_length=MAX_TABLES,
        fail_fast=True,  # An error for each of hundreds of thousands of names would take seconds.
        description="Data that the run read: `table` for a whole table, `table/partition` for one partition",
        examples=[["digits", "ads.clicks/ds=2026-11-21"]],
    )
    gpu_type: Name | None = None
    gpu_hours: _Hours = 0.0
    cpu_hours: _Hours = 0.0
    priority: int = Field(LOWEST_LEVEL, ge=HIGHEST_LEVEL, le=LOWEST_LEVEL, strict=True)
    ended_at: AwareDatetime

    @model_validator(mode="after")
    def _consistent(self) -> "RunBody":
        if self.source == OWN_SOURCE:
            raise ValueError(f"source: {self.source!r}: must be another name; mizzen records its own workloads itself")
        if self.gpu_hours > 0 and self.gpu_type is None:
            raise ValueError(f"gpu_hours: {self.gpu_hours:g}: must be 0 without a gpu_type")
        if len(set(self.tables)) < len(self.tables):
            twice = sorted({table for table in self.tables if self.tables.count(table) > 1})
            raise ValueError(f"tables: {', '.join(twice)}: must occur once")
        return self


class UsageBody(Body):
    """Runs to record; either all are recorded or none."""

    most_values = 400_000  # The number that `api.max_body_bytes` has room for by default.
    runs: list[RunBody] = Field(min_length=1, max_length=MAX_RUNS)


class RecordedView(View):
    """The number of recorded runs."""

    recorded: int
    known: int = Field(description="Runs whose source and id were already recorded; they are not changed")


@router.post("", summary="Record runs of jobs")
def record_usage(body: UsageBody, state: StateOf, caller: Operator) -> RecordedView:
    """Records the tables that runs read and the resources that they used. Idempotent by a run's source and id."""
    with state.transaction() as session:
        _check_tables(session, body.runs)
        recorded = record_runs(
            session,
            [
                {
                    **run.model_dump(include={"source", "run", "job", "kind", "priority", "tables", "cpu_hours"}),
                    "app": run.app or run.kind,
                    "gpu_hours": {run.gpu_type: run.gpu_hours} if run.gpu_type is not None else {},
                    "ended_at": run.ended_at,
                }
                for run in body.runs
            ],
        )
        if recorded:
            sources = sorted({run.source for run in body.runs})
            write_audit(session, caller, "usage.record", ", ".join(sources[:_NAMED]), runs=recorded)
    return RecordedView(recorded=recorded, known=len(body.runs) - recorded)


def _check_tables(session: Session, runs: Sequence[RunBody]) -> None:
    unknown = unknown_reads(session, {read for run in runs for read in run.tables})
    wrong = [
        FieldError(f"runs[{index}].tables[{place}]", unknown[read], read)
        for index, run in enumerate(runs)
        for place, read in enumerate(run.tables)
        if read in unknown
    ]
    if wrong:
        detail = "; ".join(f"{e.path}: {e.value!r}: {e.message}" for e in wrong[:_NAMED])
        raise HttpProblem(ProblemType.INVALID_REQUEST, detail, errors=wrong)
