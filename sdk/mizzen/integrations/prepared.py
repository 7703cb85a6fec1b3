"""A data loader that Hugging Face's accelerate does not wrap: `accelerator.prepare(loader)` returns it unchanged.

Its own wrapper would fetch a batch before the previous one is used, so the loader's position would be one batch ahead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class PreparedLoader:
    """A loader that moves batches to accelerate's device, and tells accelerate when an epoch ends, if it is prepared.

    At the last batch of an epoch accelerate steps the optimizer although it accumulates more batches. The end of a
    stream is not known before, so the gradients of its last batches are added to those of the next epoch.
    """

    end_of_dataloader = False
    """Read by accelerate: whether the batch in use is the last one of the epoch."""
    remainder = -1
    """Read by accelerate: the number of samples in the last batches of all ranks; -1: unknown."""
    use_stateful_dataloader = False
    _is_prepared = False

    @property
    def _is_accelerate_prepared(self) -> bool:
        self._is_prepared = True  # Only `Accelerator.prepare` asks.
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, _: bool) -> None:
        self._is_prepared = True

    @contextmanager
    def _handing_over(self) -> Iterator[Callable[[Any, Callable[[], bool]], Any]]:
        """Yield a function that returns each batch; its second argument says whether that is the last one."""
        if not self._is_prepared:
            yield lambda batch, _: batch
            return
        from accelerate.state import GradientState, PartialState
        from accelerate.utils import send_to_device

        def hand_over(batch: Any, is_last: Callable[[], bool]) -> Any:
            self.end_of_dataloader = is_last()
            return send_to_device(batch, PartialState().device)

        state = GradientState()
        state._add_dataloader(self)
        try:
            yield hand_over
        finally:
            self.end_of_dataloader = False
            state._remove_dataloader(self)
