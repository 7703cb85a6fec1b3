"""How long a watch of Kubernetes objects pauses after it was interrupted."""

from collections.abc import Iterator
from typing import Any

import pytest

from capacity.provider import ProviderUnavailable
from capacity.providers.kubernetes.api import ApiRefused
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


def test_a_watch_that_is_refused_is_replaced_by_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few refusals, as of a server that has just started, change nothing.

    Then objects are listed again and again, with longer pauses, until the watch is allowed.
    """
    said: list[str] = []
    lists: list[int] = []
    lengths: list[int] = []
    api: Any = _Api(0)

    def watched(_resource: str, _version: str, _labels: str, for_s: int) -> Iterator[tuple[str, dict[str, Any]]]:
        lengths.append(for_s)
        if len(lengths) < 8:
            raise ApiRefused(403, "Forbidden", "cannot watch")
        if len(lengths) == 10:
            watch.close()
        return iter(())

    watch = ObjectWatch("k8s", api, "pods", "", lambda _: lists.append(len(lengths)), lambda *_: None)
    monkeypatch.setattr(api, "watch", watched)
    monkeypatch.setattr(watch._closed, "wait", lambda for_s: said.append(f"{for_s:g} {watch.refused}"))
    watch._run()
    assert said[:7] == ["0.5 ", "1 ", "2 ", "4 ", "8 cannot watch", "15 cannot watch", "15 cannot watch"]
    assert watch.refused == ""
    assert lists == [0, 5, 6, 7]
    assert lengths == [240] * 5 + [5] * 3 + [240] * 2
