"""How long a watch of Kubernetes objects pauses after it was interrupted."""

from collections.abc import Iterator
from typing import Any

import pytest

from capacity.provider import ProviderUnavailable
from capacity.providers.kubernetes.object_watch import ObjectWatch


class _Api:
    """Lists nothing, and interrupts each watch: after one event, or, from `silent_from` on, before."""

    def __init__(self, silent_from: int) -> None:
        self.watches, self._silent_from = 0, silent_from

    def objects(self, *_: Any, **__: Any) -> tuple[list[Any], str]:
        return [], "0"

    def watch(self, *_: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        self.watches += 1
        if self.watches < self._silent_from:
            yield "ADDED", {"metadata": {"resourceVersion": str(self.watches)}}
        raise ProviderUnavailable("connection reset")


def test_only_failures_in_a_row_make_pauses_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that has received events is continued soon, however often it was interrupted before."""
    api: Any = _Api(6)
    watch = ObjectWatch("k8s", api, "pods", "", lambda _: None, lambda *_: None)
    pauses: list[float] = []

    def pause(for_s: float) -> None:
        pauses.append(for_s)
        if len(pauses) == 9:
            watch.close()

    monkeypatch.setattr(watch._closed, "wait", pause)
    watch._run()
    assert pauses == [0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 4.0, 8.0]
