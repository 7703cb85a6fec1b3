"""Loops around `step()`, as people write them: they resume exactly, or a warning before the first save says what to do.

Each script is the head and one of the bodies. It is killed after a number of steps by an exception that it does not
catch, and started again.
"""

import gc
import re
from pathlib import Path

import pytest

from tests.sdk.killed_scripts import run_until_killed
from tests_integrations.scripts import values

HEAD = """
import itertools
from itertools import cycle, islice
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(0)
data = TensorDataset(torch.randn(30, 4), torch.randn(30, 1))
val = DataLoader(TensorDataset(torch.randn(9, 4), torch.randn(9, 1)), batch_size=3)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
checkpointer = Checkpointer("ckpt", interval_s=0)
plain = DataLoader(data, batch_size=6)
loader = ResumableLoader(data, batch_size=6, shuffle=True)
checkpointer.track(model=model, optimizer=optimizer, plateau=plateau, loader=loader)


def train(inputs, targets):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    killed()
    return loss.item()


def endless(batches):
    while True:
        for batch in batches:
            yield batch


"""
STEP = "train(*batch); step += 1; checkpointer.step(step)"
EPOCHS = "step = checkpointer.restore()\nfor epoch in range(loader.epoch, 3):\n    "
ENDLESS = "step = checkpointer.restore()\nwhile step < 12:\n    batch = next(batches); " + STEP

EXACT = {
    "chain": "batches = itertools.chain.from_iterable(itertools.repeat(loader))\n" + ENDLESS,
    "generator": "batches = endless(loader)\n" + ENDLESS,
    "limit": EPOCHS + f"for i, batch in enumerate(loader, loader.used):\n        if i == 3: break\n        {STEP}",
    "log": EPOCHS
    + """total = 0.0
    for i, batch in enumerate(loader):
        total += train(*batch); step += 1
        if i % 2 == 1:
            print(epoch, i, total / 2)
            total = 0.0
        checkpointer.step(step)""",
    "accumulate": EPOCHS
    + """for i, (inputs, targets) in enumerate(loader):
        (model(inputs) - targets).square().mean().backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            killed(); step += 1; checkpointer.step(step)""",
    "positioned": """step = checkpointer.restore()
for epoch in range(step // 5, 3):
    for batch in DataLoader(Subset(data, range(step % 5 * 6, 30)), batch_size=6):
        train(*batch); step += 1; checkpointer.step(step)""",
    "skipped": f"""step = checkpointer.restore()
for epoch in range(step // 5, 3):
    for batch in islice(plain, step % 5, None):
        {STEP}""",
    "phases": """checkpointer.progress.update(warm=0, main=0)
step = checkpointer.restore()
for phase in ("warm", "main"):
    for epoch in range(checkpointer.progress[phase], 3):
        for batch in plain: train(*batch)
        step += 1; checkpointer.progress[phase] = epoch + 1; checkpointer.step(step)""",
    "validation": EPOCHS
    + """total = 0.0
    for batch in loader:
        total += train(*batch); step += 1; checkpointer.step(step)
    print(total / len(loader))
    total = 0.0
    for inputs, targets in val: total += nn.functional.mse_loss(model(inputs), targets).item()
    plateau.step(total)""",
    "queue": """data_at = {"position": 0}
checkpointer.track(data_at=data_at)
checkpointer.restore()
rows = itertools.count(data_at["position"])
while (row := next(rows)) < 8:
    train(*data[row : row + 3]); data_at["position"] = row + 1; checkpointer.step(row + 1)""",
    "trainer": """class Trainer:
    def __init__(self):
        self.step, self.seen, self.hooks = checkpointer.restore(), 0, [lambda trainer: None, Trainer.save]
    def save(self):
        self.step += 1; checkpointer.step(self.step)
    def fit(self):
        for self.epoch in range(loader.epoch, 3):
            self.meter = []
            for self.batch in loader:
                self.meter.append(train(*self.batch)); self.seen += 1
                if self.seen % 2 == 0: print(self.seen, sum(self.meter))
                for hook in self.hooks: hook(self)
Trainer().fit()""",
    "loader's generator": """own = torch.Generator().manual_seed(3)
wrapped = ResumableLoader(DataLoader(data, batch_size=6, shuffle=True, generator=own))
checkpointer.track(wrapped=wrapped)
step = checkpointer.restore()
for epoch in range(wrapped.epoch, 3):
    for batch in wrapped: """
    + STEP,
    "generator of the epoch": """own = torch.Generator()
shuffled = DataLoader(data, batch_size=6, shuffle=True, generator=own)
for epoch in range(checkpointer.restore(), 3):
    own.manual_seed(epoch)
    for batch in shuffled: train(*batch)
    checkpointer.step(epoch + 1)""",
    "generator over a loader of a trainer": """class Trainer:
    def __init__(self): self.loader, self.step = loader, checkpointer.restore()
    def batches(self):
        while True:
            for batch in self.loader: yield batch
    def fit(self):
        batches = self.batches()
        while self.step < 12:
            train(*next(batches)); self.step += 1; checkpointer.step(self.step)
Trainer().fit()""",
    "iterators of tasks": """import random
tasks = {name: ResumableLoader(data, batch_size=6, seed=seed) for seed, name in enumerate("ab")}
choice = random.Random(0)
checkpointer.track(choice=choice, **tasks)
step = checkpointer.restore()
iterators = {name: iter(one) for name, one in tasks.items()}
while step < 12:
    task = choice.choice("ab")
    try:
        batch = next(iterators[task])
    except StopIteration:
        iterators[task] = iter(tasks[task])
        batch = next(iterators[task])
    batch = batch[0] + torch.rand(()), batch[1]
    """
    + STEP,
    "checked divisor": EPOCHS
    + """total, number = 0.0, 0
    for batch in loader:
        total += train(*batch); number += 1; step += 1; checkpointer.step(step)
    if number: print(total / number)
    print(total / number if number else 0.0)""",
    "look": "shown = iter(DataLoader(data, shuffle=True)); print(next(shown))\n"
    + EPOCHS
    + f"for batch in loader: {STEP}",
}
ADVICE = {
    "cycle": ("batches = cycle(loader)\n" + ENDLESS, r"itertools.chain.from_iterable\(itertools.repeat\(loader\)\)"),
    "plain cycle": (
        "batches = cycle(plain)\n" + ENDLESS,
        r"itertools.chain.from_iterable\(itertools.repeat\(loader\)\)",
    ),
    "plain generator": ("batches = endless(plain)\n" + ENDLESS, "batches would begin again .* ResumableLoader"),
    "islice": (EPOCHS + f"for batch in islice(loader, 3): {STEP}", r"enumerate\(loader, loader.used\)"),
    "break": (
        EPOCHS + f"for i, batch in enumerate(loader):\n        if i == 3: break\n        {STEP}",
        r"enumerate\(loader, loader.used\)",
    ),
    "last batch": (
        EPOCHS
        + """for i, (inputs, targets) in enumerate(loader):
        (model(inputs) - targets).square().mean().backward()
        if (i + 1) % 2 == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            killed(); step += 1; checkpointer.step(step)""",
        r"enumerate\(loader, loader.used\)",
    ),
    "counter": (
        f"""step = checkpointer.restore()
while step < 12:
    for batch in plain:
        {STEP}
        if step >= 12: break""",
        "the epoch would begin again. Track the loader",
    ),
    "positioned once": (
        f"""step = checkpointer.restore()
part = DataLoader(Subset(data, range(step % 5 * 6, 30)), batch_size=6)
for epoch in range(step // 5, 3):
    for batch in part: {STEP}""",
        "Create the loader in the loop over the epochs",
    ),
    "rows": (
        f"""step = checkpointer.restore()
for epoch in range(step // 5, 3):
    for first in range(0, 30, 6):
        batch = data[first : first + 6]; {STEP}""",
        "this loop would begin again",
    ),
    "epochs": (
        f"step = checkpointer.restore()\nfor epoch in range(3):\n    for batch in loader: {STEP}",
        "would begin again",
    ),
    "held": (
        "val_it = iter(val)\n"
        + EPOCHS
        + f"""for batch in loader:
        if step % 2:
            try:
                x, y = next(val_it)
            except StopIteration:
                val_it = iter(val)
                x, y = next(val_it)
            plateau.step(nn.functional.mse_loss(model(x), y).item())
        {STEP}""",
        "val_it would begin again after a restart",
    ),
    "sum": (
        EPOCHS
        + """total = 0.0
    for batch in loader:
        total += train(*batch); step += 1; checkpointer.step(step)
    plateau.step(total / len(loader))""",
        r'checkpointer.progress\["total"\]',
    ),
    "sum of a function": (
        """def epoch_of(step):
    total = 0.0
    for batch in loader:
        total += train(*batch); step += 1; checkpointer.step(step)
    return total, step

step = checkpointer.restore()
for epoch in range(loader.epoch, 3):
    loss, step = epoch_of(step)
    plateau.step(loss)""",
        r'checkpointer.progress\["total"\]',
    ),
    "patience": (
        "best, bad = float('inf'), 0\n"
        + EPOCHS
        + f"""for batch in loader: {STEP}
    loss = sum(nn.functional.mse_loss(model(x), y).item() for x, y in val)
    if loss < best:
        best, bad = loss, 0
    else:
        bad += 1
        if bad == 2: break""",
        r'checkpointer.progress\["(best|bad)"\]',
    ),
    "best of a trainer": (
        """class Trainer:
    def __init__(self): self.best, self.bad = float("inf"), 0
    def fit(self, step):
        for epoch in range(loader.epoch, 9):
            for batch in loader:
                train(*batch); step += 1; checkpointer.step(step)
            loss = sum(nn.functional.mse_loss(model(x), y).item() for x, y in val)
            if loss < self.best:
                self.best, self.bad = loss, 0
                torch.save(model.state_dict(), "best.pt")
            else:
                self.bad += 1
                if self.bad == 2: break
Trainer().fit(checkpointer.restore())""",
        r'checkpointer.progress\["(best|bad)"\]',
    ),
    "draw before the batch": (
        "import random\nbatches = endless(loader)\n"
        + ENDLESS.replace("batch = next", "optimizer.param_groups[0]['lr'] = random.random(); batch = next"),
        "this draws before the batch",
    ),
    "draw of an epoch": (
        EPOCHS + f"scale = torch.rand(())\n    for batch in loader: train(batch[0] * scale, batch[1]); {STEP}",
        "scale is drawn again",
    ),
    "generator of a loader": (
        """shuffled = DataLoader(data, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3))
for epoch in range(checkpointer.restore(), 3):
    for batch in shuffled: train(*batch)
    checkpointer.step(epoch + 1)""",
        r"checkpointer.track\(generator=shuffled.generator\)",
    ),
    "generator": (
        """own = torch.Generator().manual_seed(3)
for step in range(checkpointer.restore(), 12):
    rows = torch.randint(0, 30, (6,), generator=own)
    train(*data[rows]); checkpointer.step(step + 1)""",
        r"checkpointer.track\(generator=own\)",
    ),
    "mean": (
        EPOCHS
        + """losses = []
    for batch in loader:
        losses.append(train(*batch)); step += 1; checkpointer.step(step)
    print(sum(losses) / len(losses))""",
        "losses is 0 or empty after a restart",
    ),
}


def run(body: str, folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[str]]:
    """Runs a script until it has trained `steps` steps. Returns whether it has ended, and its warnings."""
    end = "\ntorch.save([model.state_dict(), optimizer.state_dict()], 'model.pt')\n"
    found = run_until_killed(HEAD + body + end, folder, steps, monkeypatch)
    gc.collect()  # Iterators of this run are not those of the next one.
    return found


@pytest.mark.parametrize("name", EXACT)
def test_it_is_exact_and_not_warned_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed twice, with a checkpoint at each place of an epoch, a script ends as without kills."""
    assert run(EXACT[name], tmp_path / "whole", 0, monkeypatch) == (True, [])
    for steps in (3, 5, 6):
        folder = tmp_path / str(steps)
        for limit in (steps, 3, 0):
            has_ended, told = run(EXACT[name], folder, limit, monkeypatch)
            assert not told
            if has_ended:
                break
        assert has_ended
        assert values(folder / "model.pt") == values(tmp_path / "whole" / "model.pt"), steps


@pytest.mark.parametrize("name", ADVICE)
def test_what_a_restart_would_not_continue_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning comes once, before the first save, and names the line that repairs it."""
    body, advice = ADVICE[name]
    _, told = run(body, tmp_path / "whole", 7, monkeypatch)
    assert len(told) == 1 and "would not continue exactly" in told[0]
    assert re.search(advice, told[0])
