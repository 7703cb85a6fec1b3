"""The Temporal schedule of the nightly placement of tables, from the settings."""

from datetime import timedelta

from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleCalendarSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleRange,
    ScheduleSpec,
    ScheduleUpdate,
    ScheduleUpdateInput,
)

from domain import ids
from infra.config.data import NightlySettings


def placement_schedule(nightly: NightlySettings) -> Schedule:
    """Returns a schedule with one start a day, in the time zone of the settings. It skips starts during a run."""
    calendars = []
    if nightly.start is not None:
        hour, minute = (int(part) for part in nightly.start.split(":"))
        calendars.append(ScheduleCalendarSpec(hour=[ScheduleRange(hour)], minute=[ScheduleRange(minute)]))
    return Schedule(
        action=ScheduleActionStartWorkflow(
            "PlacementRunWorkflow",
            id=ids.PLACEMENT_RUN_WORKFLOW_ID,
            task_queue=ids.CONTROL_QUEUE,
            static_summary="plans the placement of tables and moves them",
        ),
        spec=ScheduleSpec(
            calendars=calendars,
            jitter=timedelta(seconds=nightly.jitter_s),
            time_zone_name=nightly.time_zone,
        ),
        policy=SchedulePolicy(
            overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(seconds=nightly.catch_up_s)
        ),
    )  # fmt: skip


async def set_schedule(client: Client, nightly: NightlySettings) -> None:
    """Creates the schedule, or updates the existing one. Whether it is paused in Temporal does not change."""
    wanted = placement_schedule(nightly)
    try:
        await client.create_schedule(ids.PLACEMENT_SCHEDULE_ID, wanted)
    except ScheduleAlreadyRunningError:

        def change(found: ScheduleUpdateInput) -> ScheduleUpdate:
            wanted.state = found.description.schedule.state
            return ScheduleUpdate(wanted)

        await client.get_schedule_handle(ids.PLACEMENT_SCHEDULE_ID).update(change)
