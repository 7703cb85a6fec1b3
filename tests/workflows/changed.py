"""A workload's workflow with a change that breaks those that are running: for the test that replays find such."""

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.protocol import WorkloadInput

from workflows.workload import WorkloadWorkflow


@workflow.defn(name="WorkloadWorkflow")
class ImpatientWorkflow(WorkloadWorkflow):
    """Pauses before its first award, as no workflow did whose history was recorded."""

    @workflow.run
    async def run(self, state: WorkloadInput) -> str:
        await workflow.sleep(timedelta(seconds=1))
        return await super().run(state)
