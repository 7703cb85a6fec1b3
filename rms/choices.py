"""Clusters and GPU types on which a job may run, grouped by preference.

The preference is the GPU type, then the capacity kind, the score of the migration for a job that left a machine of an
owner (`domain.scheduling.MoveCost`), the expected departures and the price per hour.
"""

from typing import NamedTuple

import numpy as np

from domain.capacity import nano_usd_per_h
from domain.scheduling import JobRequest
from rms.arrays import B1, I4
from rms.machines import Layout


class Choices(NamedTuple):
    """Preference classes of a job, the most preferred first.

    A class is a GPU type together with the clusters of the same capacity kind, migration, departures and price. Options
    in one class differ only in their victims and their packing.
    """

    type: I4
    """GPU type number (`Region.type_numbers`) of each class."""
    preference: I4
    """Index of the GPU type of each class in the job's list."""
    allowed: B1
    """(classes, clusters): whether the cluster belongs to the class."""
    anywhere: B1
    """Whether the job accepts the capacity kind of each cluster."""


def choices(layout: Layout, region: str, job: JobRequest, types: I4) -> Choices:
    """Returns the preference classes of a job in a region. `types` is `Region.type_numbers` of the job."""
    names = job.gpu_types if job.gpus_per_task else (None,)
    classes: dict[tuple[int, ...], list[int]] = {}
    for preference, name in enumerate(names):
        for cluster, of in enumerate(layout.clusters):
            if name is not None and (of, name) not in layout.gpu_usd_per_h:
                continue
            terms = layout.terms[of]
            if terms.capacity in job.capacity:
                price = nano_usd_per_h(
                    job.gpus_per_task,
                    layout.gpu_usd_per_h.get((of, name), 0.0),
                    job.cpus_milli_per_task,
                    terms.core_usd_per_h,
                )
                kind, move = job.capacity.index(terms.capacity), job.move_to(region, terms.cluster)
                key: tuple[int, ...] = preference, kind, *move, terms.nano_departures_per_h, price
                classes.setdefault(key, []).append(cluster)
    ordered = sorted(classes)
    allowed = np.zeros((len(ordered), len(layout.clusters)), np.bool_)
    for number, key in enumerate(ordered):
        allowed[number, classes[key]] = True
    preference_of = np.array([preference for preference, *_ in ordered], np.int32)
    anywhere = np.array([layout.terms[of].capacity in job.capacity for of in layout.clusters], np.bool_)
    return Choices(types[preference_of], preference_of, allowed, anywhere)


def spanning(types: I4) -> Choices:
    """Returns the classes of a region that is treated as one cluster: one class per GPU type."""
    once = np.ones((len(types), 1), np.bool_)
    return Choices(types, np.arange(len(types), dtype=np.int32), once, np.ones(1, np.bool_))
