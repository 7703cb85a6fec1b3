"""Where in a region a job may run, by how its document prefers it: GPU type, kind of capacity, price an hour."""

from typing import NamedTuple

import numpy as np

from domain.capacity import nano_usd_per_h
from domain.scheduling import JobRequest
from rms.arrays import B1, I4
from rms.machines import Layout


class Choices(NamedTuple):
    """Classes of places, the most preferred first. Within a class only victims and packing make a difference."""

    type: I4
    """By class: the number of its GPU type (`Region.type_numbers`)."""
    preference: I4
    """By class: the place of its type in the job's list."""
    allowed: B1
    """(classes, clusters): whether a cluster belongs to a class."""
    anywhere: B1
    """By cluster: whether the job may run there at all."""


def choices(layout: Layout, job: JobRequest, types: I4) -> Choices:
    """The classes for a job. `types` as `Region.type_numbers`."""
    names = job.gpu_types if job.gpus_per_task else (None,)
    classes: dict[tuple[int, int, int], list[int]] = {}
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
                classes.setdefault((preference, job.capacity.index(terms.capacity), price), []).append(cluster)
    ordered = sorted(classes)
    allowed = np.zeros((len(ordered), len(layout.clusters)), np.bool_)
    for number, key in enumerate(ordered):
        allowed[number, classes[key]] = True
    preference_of = np.array([preference for preference, _, _ in ordered], np.int32)
    anywhere = np.array([layout.terms[of].capacity in job.capacity for of in layout.clusters], np.bool_)
    return Choices(types[preference_of], preference_of, allowed, anywhere)


def spanning(types: I4) -> Choices:
    """The classes for a region whose clusters count as one: its types."""
    once = np.ones((len(types), 1), np.bool_)
    return Choices(types, np.arange(len(types), dtype=np.int32), once, np.ones(1, np.bool_))
