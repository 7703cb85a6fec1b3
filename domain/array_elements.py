"""Arrays: the indexes and parameters of their elements, and the braces in their documents.

The elements of an array are numbered twice. The index is the number that the user chose. The position counts the
indexes from 0 in the order of the document, and the waiting elements of an array are a set of positions.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from math import prod

from domain.ids import array_of
from domain.spec import ArraySpec, IndexRange, JobSpec, WorkloadSpec

INDEX = "index"
"""The name of the index in braces."""
_BRACES = re.compile(r"\{\{\{\{|\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}|\{\{")


class UnknownParameter(ValueError):
    """Braces that name no parameter. The message is the text in the braces."""


def length(one: IndexRange) -> int:
    """Returns the number of indexes in a range."""
    first, last, step = one
    return (last - first) // step + 1


def size(ranges: Sequence[IndexRange]) -> int:
    """Returns the number of indexes in ranges."""
    return sum(map(length, ranges))


def indexes(ranges: Sequence[IndexRange]) -> Iterator[int]:
    """Yields the indexes of ranges, in the order of their positions."""
    for first, last, step in ranges:
        yield from range(first, last + 1, step)


def indexes_at(ranges: Sequence[IndexRange], positions: Iterable[int]) -> Iterator[int]:
    """Yields the indexes at positions, which must be below the number of indexes."""
    starts = _starts(ranges)
    for position in positions:
        number = bisect_right(starts, position) - 1
        first, _, step = ranges[number]
        yield first + (position - starts[number]) * step


def position_of(ranges: Sequence[IndexRange], index: int) -> int | None:
    """Returns the position of an index; None: the array does not have it."""
    for start, (first, last, step) in zip(_starts(ranges), ranges, strict=False):
        if first <= index <= last and (index - first) % step == 0:
            return start + (index - first) // step
    return None


def _starts(ranges: Sequence[IndexRange]) -> list[int]:
    """Returns the position at which each range begins, and the number of indexes."""
    return list(accumulate(map(length, ranges), initial=0))


def shown_indexes(ranges: Sequence[IndexRange]) -> str:
    """Returns ranges as in a document, such as `0-9,20-29:2`."""
    return ",".join(
        str(first) if first == last else f"{first}-{last}" + (f":{step}" if step > 1 else "")
        for first, last, step in ranges
    )


# ----------------------------------------------------------------------------------------------------------- parameters


def combinations(array: ArraySpec) -> int:
    """Returns the number of entries of the list, or of combinations of the matrix that are not excluded."""
    return len(array.entries) or prod(map(len, array.matrix.values())) - len(_excluded(array))


def parameters(array: ArraySpec, index: int) -> dict[str, str]:
    """Returns the parameters of the element with an index. The last parameter of the matrix changes fastest."""
    if array.entries:
        return array.entries[index if len(array.entries) > 1 else 0]
    number = index
    for excluded in _excluded(array):
        if excluded > number:
            break
        number += 1
    values: dict[str, str] = {}
    for name, options in reversed(array.matrix.items()):
        number, place = divmod(number, len(options))
        values[name] = options[place]
    return dict(reversed(values.items()))


def options(array: ArraySpec) -> dict[str, tuple[str, ...]]:
    """Returns the values of each parameter, those of a list in its order."""
    listed = {name: tuple(entry[name] for entry in array.entries) for name in (array.entries or ({},))[0]}
    return listed or array.matrix


def _excluded(array: ArraySpec) -> list[int]:
    """Returns the sorted indices of the excluded combinations among all combinations of the values."""
    found = set[int]()
    for entry in array.exclude:
        places = [
            [place for place, value in enumerate(options) if entry.get(name, value) == value]
            for name, options in array.matrix.items()
        ]
        for combination in product(*places):
            number = 0
            for place, options in zip(combination, array.matrix.values(), strict=True):
                number = number * len(options) + place
            found.add(number)
    return sorted(found)


# --------------------------------------------------------------------------------------------------------------- braces


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replaces `{{ NAME }}` by values, and `{{{{` by two braces.

    Raises:
        UnknownParameter: two braces are not followed by the name of a value and `}}`.
    """

    def value(found: re.Match[str]) -> str:
        if found[0] == "{{{{":
            return "{{"
        if found[1] not in values:
            raise UnknownParameter(found[1] or "")
        return values[found[1]]

    return _BRACES.sub(value, text)


def is_runner(spec: WorkloadSpec) -> bool:
    """Returns whether a workload is a runner of an array, and not the array or an element."""
    return spec.array is not None and spec.array.runners is not None and not spec.array.ranges


def filled(spec: WorkloadSpec) -> WorkloadSpec:
    """Returns the specification of an element, whose array has one index, with the values in its strings.

    That of a runner is returned as it is: the agent inserts the values of each element (`values_of`).
    """
    if spec.array is None or is_runner(spec):
        return spec
    values = _values(spec.array)
    jobs = tuple(_filled_job(job, values) for job in spec.jobs)
    files = {path: fill(content, values) for path, content in spec.files.items()}
    return spec.model_copy(update={"jobs": jobs, "files": files})


def variables(spec: WorkloadSpec, workload_id: str) -> dict[str, str]:
    """Returns the variables of an element's tasks, by name; none if the workload is no element of an array."""
    if spec.array is None or is_runner(spec):
        return {}
    return variables_of(array_of(workload_id), _values(spec.array))


def variables_of(array: str, values: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an element of an array with an id, by name. `values` are those of its parameters."""
    own = {"MIZZEN_ARRAY_ID": array, "MIZZEN_ARRAY_INDEX": values[INDEX]}
    return own | {f"MIZZEN_PARAM_{name.upper()}": value for name, value in values.items() if name != INDEX}


def values_of(array: ArraySpec, index: int) -> dict[str, str]:
    """Returns the values that replace the names in braces for the element with an index, by name."""
    return parameters(array, index) | {INDEX: str(index)}


def _values(array: ArraySpec) -> dict[str, str]:
    return values_of(array, array.ranges[0][0])


def _filled_job(job: JobSpec, values: Mapping[str, str]) -> JobSpec:
    return job.model_copy(
        update={
            "argv": tuple(fill(word, values) for word in job.argv),
            "script": None if job.script is None else fill(job.script, values),
            "setup": None if job.setup is None else fill(job.setup, values),
            "env": {name: fill(value, values) for name, value in job.env.items()},
        }
    )
