"""A wrapper around a provider that injects chosen or random faults."""

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from capacity.offers import Offer
from capacity.provider import FoundMachine, LaunchRequest, Provider, ProviderUnavailable
from capacity.providers.registry import open_providers
from infra.config.settings import Settings

T = TypeVar("T")


class Unreliable:
    """Forwards calls to the wrapped provider, except for injected faults."""

    def __init__(self, behind: Provider) -> None:
        self.name = behind.name
        self.lists_late_s = behind.lists_late_s
        self.impaired = ""
        self.queues = behind.queues
        self.behind = behind
        self.asked: list[str] = []
        """Names of the called methods, in order."""
        self.faults: Callable[[str], str] = lambda _: ""
        """Returns the fault for a method, or "" for none.

        `away`: not executed; `lost`: executed, but the response is lost; `late`: delayed; `twice`: executed twice.
        """
        self.knows_tokens = True
        """False: each launch creates another machine with the same tag."""
        self.says: Callable[[FoundMachine], FoundMachine] = lambda one: one
        """What the list says about a machine."""
        self._lock = threading.Lock()

    def by_chance(self, seed: int, share: float) -> None:
        """Makes this share of later calls fail in a random way."""
        chance = random.Random(seed)

        def fault(_: str) -> str:
            with self._lock:
                return chance.choice(("away", "lost", "late", "twice")) if chance.random() < share else ""

        self.faults = fault

    def offers(self) -> Sequence[Offer]:
        """See `Provider.offers`."""
        return self._through("offers", self.behind.offers)

    def launch(self, request: LaunchRequest) -> str:
        """See `Provider.launch`."""
        numbers = itertools.count()

        def launch() -> str:
            token = f"{request.instance}.{len(self.asked)}.{next(numbers)}"
            return self.behind.launch(request if self.knows_tokens else replace(request, instance=token))

        return self._through("launch", launch)

    def describe(self) -> Sequence[FoundMachine]:
        """See `Provider.describe`."""
        found = self._through("describe", self.behind.describe)
        return [self.says(replace(one, instance=one.instance.partition(".")[0])) for one in found]

    def terminate(self, native_id: str) -> None:
        """See `Provider.terminate`."""
        self._through("terminate", lambda: self.behind.terminate(native_id))

    def _through(self, method: str, ask: Callable[[], T]) -> T:
        self.asked.append(method)
        fault = self.faults(method)
        if fault == "away":
            raise ProviderUnavailable(f"{method}: no answer")
        if fault == "late":
            time.sleep(0.3)
        if fault == "twice":
            ask()
        answer = ask()
        if fault == "lost":
            raise ProviderUnavailable(f"{method}: the answer is lost")
        return answer


def unreliable_providers(settings: Settings, *, share: float, knows_tokens: bool) -> dict[str, Unreliable]:
    """Opens an installation's providers and makes a share of their calls fail; the seed is the process id."""
    out = {}
    for name, provider in open_providers(settings).items():
        out[name] = Unreliable(provider)
        out[name].by_chance(os.getpid(), share)
        out[name].knows_tokens = knows_tokens
    return out
