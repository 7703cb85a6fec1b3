"""What scripts do before an inner loop, and to objects that are not tracked: exact, or told before the first save."""

import re
from pathlib import Path

import pytest

from tests_integrations.scripts import values
from tests_integrations.test_repeats import EPOCHS, STEP, run

SECOND = """second = ResumableLoader(data, batch_size=10, seed=5)
checkpointer.track(second=second)
"""
TEACHER = """import copy
teacher = copy.deepcopy(model)
kept = {"sum": 0.0, "targets": torch.zeros(30, 1)}
checkpointer.track(teacher=teacher, kept=kept)
"""
SYNCED = """teacher.load_state_dict(model.state_dict())
        plateau.step(kept["sum"])
        kept["sum"] = 0.0
        with torch.no_grad():
            kept["targets"] = model(data.tensors[0])
        if epoch == 1:
            model.reset_parameters()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5"""
TAUGHT = """for x, y in loader:
        kept["sum"] += train(x, y + teacher(x).detach() + kept["targets"][: len(y)])
        step += 1; checkpointer.step(step)"""

EXACT = {
    "only at the beginning": TEACHER + EPOCHS + f"if not loader.used:\n        {SYNCED}\n    " + TAUGHT,
    "the same at each start": EPOCHS
    + f"""checkpointer.progress["epoch"] = epoch
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + epoch)
    params = [one for one in model.parameters()]
    if epoch == 0 and step == 0:
        model.reset_parameters()
    for batch in loader: {STEP}""",
    "one loader after another": SECOND
    + f"""step = checkpointer.restore()
for epoch in range(second.epoch, 2):
    if loader.epoch == second.epoch:
        for batch in loader: {STEP}
    for batch in second: {STEP}""",
    "loaders in a loop": SECOND
    + f"""step = checkpointer.restore()
for epoch in range(second.epoch, 2):
    for one in (loader, second):
        if one.epoch != second.epoch: continue
        for batch in one: {STEP}""",
    "tracked list": """import random
random.seed(1)
order = list(range(30))
checkpointer.track(data={"order": order})
for epoch in range(checkpointer.restore(), 8):
    random.shuffle(order)
    train(*data[order[:6]]); checkpointer.step(epoch + 1)""",
    "schedule that is caught up": """decay = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
step = checkpointer.restore()
for group in optimizer.param_groups: group["lr"] = 0.1
for _ in range(step): decay.step()
for epoch in range(loader.epoch, 3):
    for batch in loader: train(*batch); decay.step(); step += 1; checkpointer.step(step)""",
    "counts that are shown": "import numpy as np\nseen = np.zeros(2)\n"
    + EPOCHS
    + """for x, y in loader:
        loss = train(x, y); seen[int(loss > 1)] += 1
        step += 1; checkpointer.step(step)
    print(seen / seen.sum())""",
}
AGAIN = r"done again .* if not loader.used: before it"
ADVICE = {
    "weights": (TEACHER + EPOCHS + "teacher.load_state_dict(model.state_dict())\n    " + TAUGHT, AGAIN),
    "schedule": (EPOCHS + f"plateau.step(1.0)\n    for batch in loader: {STEP}", AGAIN),
    "sum": (TEACHER + EPOCHS + 'kept["sum"] = 0.0\n    ' + TAUGHT, AGAIN),
    "reset": (EPOCHS + f"if epoch == 1: model.reset_parameters()\n    for batch in loader: {STEP}", AGAIN),
    "rate": (
        EPOCHS + f"for group in optimizer.param_groups: group['lr'] *= 0.9\n    for batch in loader: {STEP}",
        AGAIN,
    ),
    "targets": (
        EPOCHS
        + f"targets = model(data.tensors[0]).detach()\n    for x, y in loader: batch = x, y + targets[:6]; {STEP}",
        "targets is made again, from other weights",
    ),
    "optimizer": (
        EPOCHS + f"optimizer = torch.optim.Adam(model.parameters())\n    for batch in loader: {STEP}",
        "optimizer is made again",
    ),
    "loaders": (
        SECOND + EPOCHS + f"for batch in loader: {STEP}\n    for batch in second: {STEP}",
        "would iterate loader once more. Write if loader.epoch == second.epoch",
    ),
    "shuffled list": (
        """import random
order = list(range(30))
for epoch in range(checkpointer.restore(), 8):
    random.shuffle(order)
    train(*data[order[:6]]); checkpointer.step(epoch + 1)""",
        r'checkpointer.progress\["order"\]',
    ),
    "items": (
        "losses = torch.ones(30)\n"
        + EPOCHS
        + """for i, (x, y) in enumerate(loader, loader.used):
        train(x, y * losses[i]); losses[i] = 0.5 * losses[i] + x.sum()
        step += 1; checkpointer.step(step)""",
        r'track\(losses=\{"losses": losses\}\)',
    ),
    "rate in a variable": (
        "lr = 0.1\n" + EPOCHS + f"for batch in loader: lr *= 0.9; optimizer.param_groups[0]['lr'] = lr; {STEP}",
        r'checkpointer.progress\["lr"\]',
    ),
    "best weights": (
        "best = None\n"
        + EPOCHS
        + """for batch in loader:
        loss = train(*batch)
        if loss < checkpointer.progress.get("loss", 9.0):
            checkpointer.progress["loss"], best = loss, {"weight": model.weight.clone()}
        step += 1; checkpointer.step(step)
model.load_state_dict(best, strict=False)""",
        r'checkpointer.progress\["best"\]',
    ),
    "untracked schedule": (
        "decay = torch.optim.lr_scheduler.StepLR(optimizer, 4)\n"
        + EPOCHS
        + f"for batch in loader: decay.step(); {STEP}",
        r"checkpointer.track\(decay=decay\)",
    ),
    "untracked average": (
        "average = torch.optim.swa_utils.AveragedModel(model)\n"
        + EPOCHS
        + f"for batch in loader: average.update_parameters(model); {STEP}",
        r"checkpointer.track\(average=average\)",
    ),
    "fabric": (
        """from lightning.fabric import Fabric
batches = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
"""
        + EPOCHS
        + f"for batch in batches: {STEP}",
        "Iterate the ResumableLoader itself",
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_it_is_exact_and_not_warned_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed within an epoch, at its end, and once more, a script ends as without kills."""
    assert run(EXACT[name], tmp_path / "whole", 0, monkeypatch) == (True, [])
    for steps in (3, 5, 7):
        for limit in (steps, 3, 0):
            has_ended, told = run(EXACT[name], tmp_path / str(steps), limit, monkeypatch)
            assert not told
            if has_ended:
                break
        assert has_ended
        assert values(tmp_path / str(steps) / "model.pt") == values(tmp_path / "whole" / "model.pt"), steps


@pytest.mark.parametrize("name", ADVICE)
def test_it_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning names the line and the repair."""
    body, advice = ADVICE[name]
    _, told = run(body, tmp_path, 4, monkeypatch)
    assert len(told) == 1 and "would not continue exactly" in told[0]
    assert re.search(advice, told[0])
