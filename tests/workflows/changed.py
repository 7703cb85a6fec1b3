"""A workload workflow with an incompatible change; a test checks that replays detect it."""

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.protocol.workloads import WorkloadInput

from workflows.workload import WorkloadWorkflow


@workflow.defn(name="WorkloadWorkflow")
class ImpatientWorkflow(WorkloadWorkflow):
    """A workflow that sleeps before its first award, unlike all recorded workflows."""

    @workflow.run
    async def run(self, state: WorkloadInput) -> str:
        await workflow.sleep(timedelta(seconds=1))
        return await super().run(state)
