"""Loaders in the loops that people write: resumed after any step, a loop yields what it would have yielded."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from mizzen.checkpoint import Checkpointer, CheckpointWarning, StateError, Tracked
from mizzen.integrations.torch import ResumableLoader

STEPS = 14


def loaders() -> dict[str, ResumableLoader]:
    """Returns a short and a long loader, whose samples are indices."""
    return {
        "short": ResumableLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=True),
        "long": ResumableLoader(TensorDataset(torch.arange(20)), batch_size=4, shuffle=True),
    }


def in_step(short: ResumableLoader, long: ResumableLoader) -> Iterator[Any]:
    """Two loaders side by side: the epoch ends with the shorter one."""
    while True:
        yield from zip(short, long, strict=False)


def in_step_reversed(short: ResumableLoader, long: ResumableLoader) -> Iterator[Any]:
    """The longer loader is asked first, so one of its batches is lost at the end of each epoch."""
    while True:
        yield from zip(long, short, strict=False)


def each_begins_again(short: ResumableLoader, long: ResumableLoader) -> Iterator[Any]:
    """Each loader begins again when it ends."""
    iterators = [iter(short), iter(long)]
    while True:
        found = []
        for number, loader in enumerate((short, long)):
            try:
                found.append(next(iterators[number]))
            except StopIteration:
                iterators[number] = iter(loader)
                found.append(next(iterators[number]))
        yield found


def first_batches(short: ResumableLoader, long: ResumableLoader) -> Iterator[Any]:
    """Each step takes the first batch of a new iteration."""
    while True:
        yield next(iter(long)), next(iter(short))


@pytest.mark.parametrize("loop", [in_step, in_step_reversed, each_begins_again, first_batches])
def test_a_loop_goes_on_after_any_step(loop: Callable[..., Iterator[Any]]) -> None:
    """The batches after a restore are those that would have followed the save."""

    def run(steps: int, state: dict[str, Any] | None) -> tuple[list[Any], list[dict[str, Any]]]:
        objects = loaders()
        tracked = Tracked(objects)
        if state is not None:
            tracked.restore(state)
        seen, states = [], []
        for batches in loop(**objects):
            seen.append([batch[0].tolist() for batch in batches])
            states.append(tracked.capture(len(seen)))
            if len(seen) == steps:
                return seen, states
        raise AssertionError("the loop ended")

    whole, states = run(STEPS, None)
    for step in range(1, STEPS):
        assert run(STEPS - step, states[step - 1])[0] == whole[step:], step


def test_an_epoch_that_was_left_early_is_over_after_a_restore() -> None:
    """A save after the loop, which `break` has ended, is followed by the next epoch."""

    def epoch(loader: ResumableLoader) -> list[Any]:
        found = []
        for (batch,) in loader:
            found.append(batch.tolist())
            if len(found) == 2:
                break
        return found

    loader, again = loaders()["long"], loaders()["long"]
    epoch(loader)
    state = loader.state_dict()
    expected = epoch(loader)
    again.load_state_dict(state)
    assert epoch(again) == expected


def test_a_look_at_a_batch_before_the_restore_does_not_count(tmp_path: Path) -> None:
    """A training without a checkpoint begins at the first epoch."""
    loader, plain = loaders()["short"], loaders()["short"]
    next(iter(loader))
    checkpointer = Checkpointer(tmp_path, interval_s=0)
    checkpointer.track(loader=loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        step = checkpointer.restore()
        found = []
        for (batch,) in loader:
            found.append(batch.tolist())
            step += 1
            checkpointer.step(step)
    assert loader.epoch == 1 and found == [batch.tolist() for (batch,) in plain]


def looked(root: Path, steps: int, *, held: bool) -> list[Any]:
    """Looks at an epoch, at a batch, and trains; returns what it has seen, with the number of steps before."""
    torch.manual_seed(0)
    loader, model = loaders()["short"], torch.nn.Linear(1, 1)
    checkpointer = Checkpointer(root, interval_s=0)
    checkpointer.track(loader=loader, model=model)
    first = step = checkpointer.restore()
    seen: list[Any] = [[batch.tolist() for (batch,) in loader], next(iteration := iter(loader))[0].tolist()]
    if not held:
        del iteration
    while True:
        loader.set_epoch(loader.epoch)
        for (batch,) in loader:
            model(batch[:, None].float()).sum().backward()
            seen.append([step, batch.tolist(), torch.rand(()).item()])
            model.zero_grad()
            step += 1
            checkpointer.step(step)
            if step - first == steps:
                return seen


def train(loader: ResumableLoader, _: torch.nn.Module) -> Iterator[Any]:
    """An ordinary training."""
    for _epoch in range(loader.epoch, 4):
        for (batch,) in loader:
            yield batch


def train_on_first_batches(loader: ResumableLoader, _: torch.nn.Module) -> Iterator[Any]:
    """Each step takes several first batches."""
    while True:
        yield torch.cat([next(iter(loader))[0] for _draw in range(3)])


def look_and_train(loader: ResumableLoader, _: torch.nn.Module) -> Iterator[Any]:
    """A look at each start, and a look in each epoch."""
    next(iter(loader))
    for _epoch in range(loader.epoch, 4):
        next(iter(loader))
        for (batch,) in loader:
            yield batch


def look_at_the_first_start(loader: ResumableLoader, _: torch.nn.Module) -> Iterator[Any]:
    """A look only in the first epoch, for example to draw a graph."""
    for epoch in range(loader.epoch, 4):
        if epoch == 0:
            next(iter(loader))
        for (batch,) in loader:
            yield batch


def measure_each_epoch(loader: ResumableLoader, model: torch.nn.Module) -> Iterator[Any]:
    """The accuracy on the data of the training is measured before the training, and after each epoch."""
    sum(model(batch[:, None].float()).sum() for (batch,) in loader)
    for _ in range(loader.epoch, 4):
        for (batch,) in loader:
            yield batch
        sum(model(batch[:, None].float()).sum() for (batch,) in loader)


LOOKING = [train_on_first_batches, look_and_train, look_at_the_first_start, measure_each_epoch]


@pytest.mark.parametrize("loop", LOOKING)
def test_looks_do_not_change_the_data_of_the_training(loop: Callable[..., Iterator[Any]], tmp_path: Path) -> None:
    """After a restart at any step, twice, each script continues with the batches of an uninterrupted run."""

    def run(root: Path, steps: int) -> list[Any]:
        loader, model = loaders()["short"], torch.nn.Linear(1, 1)
        checkpointer = Checkpointer(root, interval_s=0)
        checkpointer.track(loader=loader, model=model)
        step, seen = checkpointer.restore(), []
        for batch in loop(loader, model):
            if step + len(seen) == 12:
                break
            model(batch[:, None].float()).sum().backward()
            model.zero_grad()
            with torch.no_grad():
                model.weight.add_(1)
            seen.append(batch.tolist())
            checkpointer.step(step + len(seen))
            if len(seen) == steps:
                break
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        whole = run(tmp_path / "whole", 100)
        if loop is not train_on_first_batches:
            assert whole == run_of(train)
        for cut in range(1, len(whole)):
            root = tmp_path / str(cut)
            assert run(root, cut) + run(root, 1) + run(root, 100) == whole, cut


def run_of(loop: Callable[..., Iterator[Any]]) -> list[Any]:
    """Returns the batches of a loop that is not saved."""
    return [batch.tolist() for batch in loop(loaders()["short"], torch.nn.Linear(1, 1))]


def test_a_look_that_is_not_repeated_is_an_error(tmp_path: Path) -> None:
    """If the same line looks at the first start and trains at the next one, it does not train on the wrong batches."""

    def first(loader: ResumableLoader) -> Any:
        return next(iter(loader))[0]

    for start in range(2):
        loader, model = loaders()["short"], torch.nn.Linear(1, 1)
        checkpointer = Checkpointer(tmp_path, interval_s=0)
        checkpointer.track(loader=loader, model=model)
        step = checkpointer.restore()
        with nullcontext() if start == 0 else pytest.raises(StateError, match="looked at this loader 1 times"):
            batch = first(loader) if start else (first(loader), first(loader))[1]
            model(batch[:, None].float()).sum().backward()
            checkpointer.step(step + 1)


def test_attributes_that_a_script_sets_after_a_look_stay() -> None:
    """A look does not change what the script sets, for example the ratio of hard samples, but its own changes go."""

    class Growing(Sampler[int]):
        def __init__(self) -> None:
            self.size, self.passes = 2, 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            yield from range(self.size)

    sampler, model = Growing(), torch.nn.Linear(1, 1)
    loader = ResumableLoader(DataLoader(TensorDataset(torch.arange(12)), sampler=sampler))
    tracked = Tracked({"loader": loader, "model": model})
    tracked.begin()
    list(loader)
    sampler.size = 5
    assert len(list(loader)) == 5
    assert sampler.passes == 1


def test_two_iterations_of_one_loader_at_the_same_time_are_refused() -> None:
    """A loader has one position, so an iteration cannot continue after a newer one has begun."""
    loader = loaders()["short"]
    with pytest.raises(StateError, match="a newer iteration"):
        for _ in loader:
            next(iter(loader))


def test_a_look_without_parameters_is_told(tmp_path: Path) -> None:
    """Without tracked parameters a look cannot be told from an epoch, so it is one, and a warning says so."""
    loader = loaders()["short"]
    checkpointer = Checkpointer(tmp_path, interval_s=0)
    checkpointer.track(loader=loader, state={"a": 1})
    checkpointer.restore()
    next(iter(loader))
    with pytest.warns(CheckpointWarning, match="only a look"):
        next(iter(loader))


def test_looks_are_known_with_a_frozen_backbone(tmp_path: Path) -> None:
    """Many frozen parameters before the trained ones do not hide that the training has begun."""
    model = torch.nn.Sequential(
        *[torch.nn.Linear(1, 1).requires_grad_(False) for _ in range(40)], torch.nn.Linear(1, 1)
    )
    loader = loaders()["short"]
    checkpointer = Checkpointer(tmp_path, interval_s=0)
    checkpointer.track(loader=loader, model=model)
    checkpointer.restore()
    for epoch in range(2):
        assert loader.epoch == epoch
        for (batch,) in loader:
            model(batch[:, None].float()).sum().backward()


def test_a_batch_sampler_needs_no_length() -> None:
    """Torch iterates such a loader, too."""

    class Pairs:
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0, 1], [2, 3])

    loader = ResumableLoader(DataLoader(TensorDataset(torch.arange(4)), batch_sampler=Pairs()))  # type: ignore[arg-type]
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("held", [False, True])
def test_looks_after_the_restore_are_repeated(held: bool, tmp_path: Path) -> None:
    """Each start looks at the same batches, also those before its position, and then goes on where it was."""
    whole = looked(tmp_path / "whole", 8, held=held)
    order = ResumableLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=True)
    assert whole[0] == [one[1] for one in whole[2:5]] == [batch.tolist() for (batch,) in order]
    assert whole[1] == whole[0][0]
    for cut in range(1, 8):
        before = looked(tmp_path / str(cut), cut, held=held)
        after = looked(tmp_path / str(cut), 8 - cut, held=held)
        assert before[:2] == after[:2] == whole[:2]
        assert before[2:] + after[2:] == whole[2:], cut


def test_an_iterator_that_is_freed_late_does_not_end_the_iteration() -> None:
    """An older iterator of the loader, which is freed within an iteration, does not change the position."""
    loader, again = loaders()["long"], loaders()["long"]
    older = iter(loader)
    next(older)
    iteration = iter(loader)
    next(iteration)
    del older
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for (batch,) in again] == [batch.tolist() for (batch,) in iteration]
