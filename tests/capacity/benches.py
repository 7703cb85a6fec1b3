"""What the conformance suite needs of each kind of provider: one that it may use, and ways to put it into trouble.

A new kind of provider is tested by being listed here, and `test_conformance.py` fails while it is not.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from capacity.providers import Provider
from providers.static import StaticProvider
from providers.trace.cloud import Cloud
from providers.trace.provider import TraceProvider
from providers.trace.settings import TraceSettings
from tests.capacity.site import CLOUD


@dataclass(frozen=True)
class Bench:
    """A provider with at least two offers, of at most three machines each, or with none."""

    provider: Provider
    away: Callable[[], AbstractContextManager[None]]
    """While it lasts the provider does not answer."""


@contextmanager
def _trace(folder: Path) -> Iterator[Bench]:
    settings = TraceSettings.model_validate(CLOUD)
    cloud = Cloud(settings, folder / "cloud")

    @contextmanager
    def away() -> Iterator[None]:
        hidden = (folder / "cloud").rename(folder / "hidden")
        yield
        hidden.rename(folder / "cloud")

    yield Bench(TraceProvider("sim", settings, cloud), away)


@contextmanager
def _static(_: Path) -> Iterator[Bench]:
    @contextmanager
    def away() -> Iterator[None]:
        yield

    yield Bench(StaticProvider("static"), away)


BENCHES: Mapping[str, Callable[[Path], AbstractContextManager[Bench]]] = {
    "static": _static,
    "trace": _trace,
}
