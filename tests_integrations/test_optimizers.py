"""What optimizers, data and loops change while a script runs: a restart continues it, or a warning says how."""

import re
from pathlib import Path

import pytest

from tests_integrations import test_repeats
from tests_integrations.test_repeats import EPOCHS, STEP, run

GROUPS = """extra, late = nn.Linear(1, 1), nn.Linear(1, 1)
checkpointer.track(extra=extra, late=late)
def train(inputs, targets):
    optimizer.zero_grad()
    nn.functional.mse_loss(late(extra(model(inputs))), targets).backward()
    optimizer.step()
    killed()
"""
ADD = EPOCHS + "if epoch == 1: optimizer.add_param_group({'params': extra.parameters(), 'lr': 0.02})\n    "
WEIGHTED = """log_vars = torch.zeros(2, requires_grad=True)
weights = torch.optim.Adam([log_vars], lr=0.1)
def train(inputs, targets):
    optimizer.zero_grad(); weights.zero_grad()
    (nn.functional.mse_loss(model(inputs), targets) * torch.exp(-log_vars) + log_vars).sum().backward()
    optimizer.step(); weights.step()
    killed()
"""
INNER = """class Outer(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self):
        self.inner.step()


outer = Outer(torch.optim.Adam(model.parameters(), lr=0.1))
checkpointer.track(outer=outer)
def train(inputs, targets):
    outer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    outer.step()
    killed()
"""
DROPOUT = """drops = nn.Sequential(model, nn.Dropout(0.5))
checkpointer.track(drops=drops)
def train(inputs, targets):
    optimizer.zero_grad()
    nn.functional.mse_loss(drops(inputs), targets).backward()
    optimizer.step()
    killed()
"""
EXACT = {
    "added group": GROUPS + ADD + f"for batch in loader: {STEP}",
    "two added groups": GROUPS
    + ADD
    + "if epoch == 2: optimizer.add_param_group({'params': late.weight})\n    "
    + f"for batch in loader: {STEP}",
    "added group with names": GROUPS
    + "optimizer = torch.optim.Adam(model.named_parameters()); checkpointer.track(named=optimizer)\n"
    + ADD.replace("extra.parameters()", "extra.named_parameters()")
    + f"for batch in loader: {STEP}",
    "tracked weights": WEIGHTED
    + "checkpointer.track(weights=weights, log_vars={'log_vars': log_vars})\n"
    + EPOCHS
    + f"for batch in loader: {STEP}",
    "inner optimizer": INNER + "checkpointer.track(inner=outer.inner)\n" + EPOCHS + f"for batch in loader: {STEP}",
    "copies": WEIGHTED
    + """def save(): return {"log_vars": log_vars.detach().clone(), "weights": weights.state_dict()}
def load(state):
    log_vars.data.copy_(state["log_vars"])
    weights.load_state_dict(state["weights"])
checkpointer.track(pair=(save, load))
"""
    + EPOCHS
    + f"for batch in loader: {STEP}",
    "optimizer of each step": EPOCHS
    + """for batch in loader:
        probe = nn.Linear(4, 1)
        fitted = torch.optim.Adam(probe.parameters())
        probe(batch[0]).sum().backward(); fitted.step()
        """
    + STEP,
    "range test before": """loss = model(data[:6][0]).sum(); test = torch.optim.Adam(model.parameters(), lr=1e-4)
loss.backward(); test.step(); test.zero_grad()
"""
    + EPOCHS
    + f"for batch in loader: {STEP}",
    "tracked attributes": """class Best:
    def __init__(self): self.loss = 9.0
    def update(self, loss): self.loss = min(self.loss, loss)
best = Best()
checkpointer.track(best=vars(best))
"""
    + EPOCHS
    + """for batch in loader:
        best.update(step)
        train(batch[0] * best.loss, batch[1])
        step += 1; checkpointer.step(step)""",
    "list in progress": "checkpointer.progress['losses'] = []\n"
    + EPOCHS
    + """for batch in loader:
        checkpointer.progress['losses'].append(train(*batch))
        step += 1; checkpointer.step(step)
torch.save(checkpointer.progress['losses'], 'losses.pt')""",
    "changed before the restore": """wide = nn.ModuleList([model])
checkpointer.track(wide=wide)
checkpointer.restore(parts=["progress"])
for _ in range(1, checkpointer.progress.get("step", 0) // 5): wide.append(nn.Linear(1, 1))
"""
    + EPOCHS
    + f"""if len(wide) < epoch: wide.append(nn.Linear(1, 1))
    for batch in loader: {STEP}""",
    "stream that is left": DROPOUT
    + """class Stream(torch.utils.data.IterableDataset):
    at = 0
    def __iter__(self):
        while self.at < 30:
            self.at += 1
            yield data[self.at - 1]
        self.at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
stream = ResumableLoader(Stream(), batch_size=6)
checkpointer.track(stream=stream)
step = checkpointer.restore()
while step < 12:
    for batch in stream:
        """
    + STEP
    + "\n        if step == 12: break",
    "growing data": """class Growing(torch.utils.data.Dataset):
    size = 12
    def __len__(self): return self.size
    def __getitem__(self, i): return data[i]
growing = Growing()
loader = ResumableLoader(growing, batch_size=6, shuffle=True)
checkpointer.track(growing=loader)
"""
    + EPOCHS
    + f"""growing.size = 12 + 6 * epoch
    assert len(loader) == 2 + epoch
    for batch in loader: {STEP}
    assert step == (2, 5, 9)[epoch]""",
    "last loss, set before": "loss = None\n"
    + EPOCHS
    + """for batch in loader: loss = train(*batch); step += 1; checkpointer.step(step)
    print([loss for loss in [loss]], loss)""",
    "last loss of an endless loop": """step = checkpointer.restore()
while True:
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        loss = train(*batch); step += 1; checkpointer.step(step)
        if step >= 12: break
    print(loss)
    break""",
    "persistent workers": DROPOUT
    + "looked = DataLoader(data, batch_size=15, num_workers=1, persistent_workers=True)\n"
    + EPOCHS
    + f"for batch in loader: {STEP}\n    for batch in looked: pass",
}
"""Scripts that resume exactly, and cause no warning."""

ADVICE = {
    "last loss": (
        EPOCHS + "for batch in loader: loss = train(*batch); step += 1; checkpointer.step(step)\n    print(loss)",
        "loss is not set after a restart .* Set it before that loop",
    ),
    "last inputs": (
        """step = checkpointer.restore()
while step < 12:
    rows = torch.arange(3) + step
    train(*data[rows]); step += 1; checkpointer.step(step)
print(model(data[rows][0]))""",
        "rows is not set after a restart .* loop of line 38",
    ),
    "weights": (
        WEIGHTED + "checkpointer.track(weights=weights)\n" + EPOCHS + f"for batch in loader: {STEP}",
        r'weights trains log_vars, which is not .* checkpointer.track\(log_vars={"log_vars": log_vars}\)',
    ),
    "module": (
        GROUPS.replace(", late=late", "")
        + "optimizer.add_param_group({'params': late.parameters()})\n"
        + EPOCHS
        + f"for batch in loader: {STEP}",
        r"optimizer trains a parameter of late, which is not .* checkpointer.track\(late=late\)",
    ),
    "optimizer": (
        WEIGHTED + "checkpointer.track(log_vars={'log_vars': log_vars})\n" + EPOCHS + f"for batch in loader: {STEP}",
        r"weights \(Adam\) has a state that no tracked object saves. Track it: checkpointer.track\(weights=weights\)",
    ),
    "inner optimizer": (
        INNER + EPOCHS + f"for batch in loader: {STEP}",
        r"outer.inner \(Adam\) has .* Track it before outer: checkpointer.track\(inner=outer.inner\)",
    ),
}
"""Scripts that a restart would not continue, each with what its warning says."""


@pytest.mark.parametrize("name", EXACT)
def test_it_is_exact_and_not_warned_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See the test of this name in `test_repeats`."""
    monkeypatch.setitem(test_repeats.EXACT, name, EXACT[name])
    test_repeats.test_it_is_exact_and_not_warned_of(name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ADVICE)
def test_what_optimizers_lose_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning comes once, before the first save, and names the line that repairs it."""
    body, advice = ADVICE[name]
    _, told = run(body, tmp_path / "whole", 7, monkeypatch)
    assert len(told) == 1 and "would not continue exactly" in told[0]
    assert re.search(advice, told[0])


@pytest.mark.parametrize("change", ["extra.add_module('more', late)", "optimizer.add_param_group({'params': [free]})"])
def test_a_change_that_a_restart_cannot_make_is_told(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning comes once, at the first save of the changed part, and says what to call before the restore."""
    body = GROUPS.replace(", late=late", "") + "free = torch.ones(1, requires_grad=True)\n" + EPOCHS
    _, told = run(f"{body}if epoch == 1: {change}\n    for batch in loader: {STEP}", tmp_path, 12, monkeypatch)
    assert len(told) == 1
    assert re.search(r'part .* changed its entries, .* checkpointer.restore\(parts=\["progress"\]\) first', told[0])
