"""Small scenarios whose results can be computed by hand."""

import numpy as np

from research.reclaim.scenario import EPOCH_S, STEP_S, Lending, LendingScenario, LentMachines, SubmittedJobs, Traffic

HOUR_S = 3600.0
LOCAL_BYTES_S, CORE_BYTES_S = 100e6, 25e6
PLAIN = Traffic(research_share=0.0, connections=1, overhead_share=0.0, write_bytes_s=1e9)


def scenario(
    *,
    intervals: list[tuple[int, float, float, float]],
    jobs: list[tuple[float, int, float, float]],
    building: tuple[int, ...] = (0, 0),
    gpus: tuple[int, ...] = (1, 1),
    length_s: float = 10 * HOUR_S,
    traffic: Traffic = PLAIN,
    switch_bytes_s: float = 10 * LOCAL_BYTES_S,
) -> LendingScenario:
    """Returns a scenario with constant bandwidth.

    Args:
        intervals: machine, from, to and notice of each interval of lending; an end at `length_s` is no departure.
        jobs: time of submission, GPUs, work in seconds and bytes of a checkpoint of each job.
        building: the building of each machine.
        gpus: the GPUs of each machine.
        length_s: the end.
        traffic: how links are shared.
        switch_bytes_s: the bandwidth of the switch of each building.
    """
    count, places = len(building), max(building) + 1
    rows = sorted(intervals, key=lambda row: row[1])
    columns = list(zip(*rows, strict=True))
    to_s = np.array(columns[2], float)
    epochs, steps = int(np.ceil(length_s / EPOCH_S)), int(np.ceil(length_s / STEP_S))
    links = np.full((count + 3 * places, steps), CORE_BYTES_S)
    links[:count] = LOCAL_BYTES_S
    links[count : count + places] = switch_bytes_s
    submit_s, wanted, work_s, size = (np.array(column, float) for column in zip(*jobs, strict=True))
    return LendingScenario(
        name="tiny", seed=1, start_s=0.0, length_s=length_s, measured_from_s=0.0,
        buildings=tuple(f"b{n}" for n in range(places)),
        machines=LentMachines(
            tuple(f"n{n}" for n in range(count)), np.array(building), np.array(gpus), np.full(count, 24e9),
            np.ones(count, bool),
        ),
        lending=Lending(
            np.array(columns[0], np.int64), np.array(columns[1], float), to_s, np.array(columns[3], float),
            to_s < length_s,
        ),
        work=SubmittedJobs(submit_s, wanted.astype(np.int64), work_s, size, np.full(len(jobs), 8e9)),
        links_bytes_s=links, emergency_per_h=np.full((count, epochs), 0.1), notice_per_h=np.full((count, epochs), 0.1),
        restart_s=30.0, traffic=traffic,
    )  # fmt: skip
