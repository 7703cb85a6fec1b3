"""The number of pods of a Job: a gang of tasks, or an array."""

from typing import Any

from mizzen_client.convert.conversion import CannotConvert
from mizzen_client.convert.source_tree import KeyedSection

_MOST_TASKS = 100_000


class PodCounts:
    """The parallelism and the completions of a Job."""

    def __init__(self, spec: KeyedSection) -> None:
        """Read the counts in the specification of a Job.

        Raises:
            CannotConvert: a count is out of range.
        """
        self._spec = spec
        self._parallel, self._all = spec.number("parallelism"), spec.number("completions")
        self._mode = spec.text("completionMode")
        if self._mode is not None and self._mode.value not in ("Indexed", "NonIndexed"):
            raise CannotConvert(self._mode.line, f"completionMode: {self._mode.value}: must be Indexed or NonIndexed")
        self.is_unindexed = self._mode is not None and self._mode.value == "NonIndexed"
        self.is_indexed = self._mode is not None and self._mode.value == "Indexed"
        for node in (self._parallel, self._all):
            if node is not None and not 1 <= node.value <= _MOST_TASKS:
                raise CannotConvert(
                    node.line, f"parallelism and completions must be from 1 to {_MOST_TASKS}, this is {node.value}"
                )

    @property
    def pods(self) -> int:
        """Pods that run together in a JobSet."""
        return max(self._parallel.value if self._parallel else 1, self._all.value if self._all else 1)

    def is_gang(self, template: KeyedSection) -> bool:
        """Return whether the pods run together and talk to each other: they have host names, or no completions."""
        if self._all is None or self._all.value == 1:
            return True
        return self.is_indexed and template.has("spec", "subdomain")

    def note(self, target: str) -> None:
        """Explain the counts of a gang."""
        for key, node in (("parallelism", self._parallel), ("completions", self._all)):
            if node is not None and self._all is None and node.value > 1:
                self._spec.changed(key, node, target, "all tasks must succeed, and one success does not end the others")
            elif node is not None and node.value < self.pods:
                self._spec.changed(key, node, target, f"all {self.pods} tasks start together")
            elif node is not None:
                self._spec.carried(key, node, target)
        if self._mode is not None:
            self._spec.carried("completionMode", self._mode, "MIZZEN_TASK")

    def shape(self, is_gang: bool) -> tuple[int, dict[str, Any] | None]:
        """Return the number of tasks, or the array, with remarks."""
        if is_gang:
            self.note("jobs[0].tasks")
            return self.pods, None
        assert self._all is not None
        self._spec.carried("completions", self._all, "array.indexes")
        throttle = self._parallel.value if self._parallel is not None else 1
        if self._parallel is not None:
            self._spec.carried("parallelism", self._parallel, "array.throttle")
        else:
            self._spec.conversion.carried(
                self._spec.line, "no parallelism", "array.throttle (Kubernetes' default is 1)"
            )
        if self._mode is not None:
            self._spec.carried("completionMode", self._mode, "array")
        limit = {"throttle": throttle} if throttle < self._all.value else {}
        return 1, {"indexes": f"0-{self._all.value - 1}", **limit}
