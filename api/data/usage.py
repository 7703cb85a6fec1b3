"""Usage of tables by jobs that run elsewhere: Spark, Presto, and training that mizzen does not schedule."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints, model_validator
from sqlalchemy.orm import Session

from api.auth import Operator
from api.bodies import Body, JsonOnly, Line, Name, Read
from api.problems import FieldError, Kind, Problem
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

    source: Name = Field(examples=["spark"], description="Who tells of it; `mizzen` tells of its own workloads itself")
    run: _Text = Field(examples=["application_1700000000000_0042"], description="Its id at the source")
    job: _Text = Field(examples=["daily-clicks"], description="The name that the runs of a recurring job share")
    kind: Literal["ml", "spark", "presto"]
    app: Name | None = Field(None, description="Whose quota of CPU hours it counts in; null: the kind")
    tables: list[Read] = Field(
        max_length=MAX_TABLES,
        description="What it read: a table is all of it, `table/partition` one partition",
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
            raise ValueError(f"source: {self.source!r}: must be another name; mizzen tells of its workloads itself")
        if self.gpu_hours > 0 and self.gpu_type is None:
            raise ValueError(f"gpu_hours: {self.gpu_hours:g}: must be 0 where gpu_type is null")
        if len(set(self.tables)) < len(self.tables):
            raise ValueError("tables: a table or a partition is named once")
        return self


class UsageBody(Body):
    """Runs that are recorded all or none."""

    runs: list[RunBody] = Field(min_length=1, max_length=MAX_RUNS)


class UsageView(View):
    """What was recorded."""

    recorded: int
    known: int = Field(description="Runs whose source and id were there before; they stay as they were")


@router.post("", summary="Record runs of jobs")
def record_usage(body: UsageBody, state: StateOf, caller: Operator) -> UsageView:
    """Records which tables runs read and what they used. A run is recorded once, by its source and id."""
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
    return UsageView(recorded=recorded, known=len(body.runs) - recorded)


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
        raise Problem(Kind.INVALID_REQUEST, detail, errors=wrong)
