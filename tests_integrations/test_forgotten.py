"""Untracked objects that a training loop changes, such as averages of weights: told before the first save."""

import re
from pathlib import Path

import pytest

from tests_integrations import test_repeats
from tests_integrations.test_repeats import EPOCHS, STEP, run

COPY = "import copy\nteacher = copy.deepcopy(model)\n"
TAUGHT = """for x, y in loader:
        train(x, y + teacher(x).detach()); step += 1
        """
FOLLOW = """with torch.no_grad():
            for ours, other in zip(teacher.parameters(), model.parameters()):
                ours.mul_(0.9).add_(other, alpha=0.1)
        """
AGENT = """class Agent:
    def __init__(self):
        self.net = nn.Linear(4, 1)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.rate, self.seen = 1.0, []

    def learn(self, x, y):
        self.opt.zero_grad()
        nn.functional.mse_loss(self.net(x), y).backward()
        self.opt.step()
        self.rate *= 0.9


agent = Agent()
"""
LEARN = EPOCHS + "for x, y in loader: agent.learn(x, y); train(x, y * agent.rate); step += 1; checkpointer.step(step)"
METER = """class Meter:
    def __init__(self): self.sum, self.count = 0.0, 0
    def update(self, value): self.sum += value; self.count += 1
    @property
    def mean(self): return self.sum / max(self.count, 1)

"""

EXACT = {
    "a tracked average": COPY
    + "checkpointer.track(teacher=teacher)\n"
    + EPOCHS
    + TAUGHT
    + FOLLOW
    + "checkpointer.step(step)",
    "an average that is only shown": COPY
    + EPOCHS
    + f"for batch in loader:\n        {STEP[:-24]}\n        {FOLLOW}print(teacher.bias); checkpointer.step(step)",
    "inner gradients": EPOCHS
    + """for x, y in loader:
        inner = torch.autograd.grad(nn.functional.mse_loss(model(x), y), [*model.parameters()], create_graph=True)
        w, b = (one - 0.1 * grad for one, grad in zip(model.parameters(), inner))
        optimizer.zero_grad()
        nn.functional.mse_loss(nn.functional.linear(x, w, b), y).backward()
        optimizer.step(); killed(); step += 1; checkpointer.step(step)""",
    "a tracked agent": AGENT + "checkpointer.track(agent=agent, net=agent.net, opt=agent.opt)\n" + LEARN,
    "a meter of an epoch": METER
    + EPOCHS
    + """meter = Meter()
    for batch in loader:
        meter.update(train(*batch)); step += 1; checkpointer.step(step)
    print(meter.mean)""",
}
"""Scripts that resume exactly, and cause no warning."""

ADVICE = {
    "average by a loop over parameters": (
        COPY + EPOCHS + TAUGHT + FOLLOW + "checkpointer.step(step)",
        r"teacher, which .* is not in the checkpoint. Track it: checkpointer.track\(teacher=teacher\)",
    ),
    "target that is copied now and then": (
        COPY
        + EPOCHS
        + TAUGHT
        + "if step % 4 == 0: teacher.load_state_dict(model.state_dict())\n        checkpointer.step(step)",
        r"checkpointer.track\(teacher=teacher\)",
    ),
    "attribute of a holder": (
        COPY.replace("teacher", "class Context: pass\nc = Context(); c.teacher", 1)
        + EPOCHS
        + (TAUGHT + FOLLOW).replace("teacher", "c.teacher")
        + "checkpointer.step(step)",
        r"checkpointer.track\(c=c\)",
    ),
    "optimizer of an agent": (
        AGENT + "checkpointer.track(net=agent.net)\n" + LEARN,
        r"agent.opt \(Adam\) has a state that no tracked object saves.*track\(opt=agent.opt\)",
    ),
    "optimizer in a tracked agent": (
        AGENT + "checkpointer.track(agent=agent)\n" + LEARN,
        r"The state of the attribute opt of a tracked Agent is not .*checkpointer.track\(opt=\.\.\.\)",
    ),
    "meter that is returned": (
        METER
        + """def epoch_of(step):
    meter = Meter()
    for batch in loader:
        meter.update(train(*batch)); step += 1; checkpointer.step(step)
    return meter, step

step = checkpointer.restore()
for epoch in range(loader.epoch, 3):
    meter, step = epoch_of(step)
    plateau.step(meter.mean)""",
        "meter, which the loop of line",
    ),
    "count of an inner loop": (
        "rounds = 1\n"
        + EPOCHS
        + "for batch in loader:\n        for _ in range(rounds): train(*batch)\n        rounds += 1; step += 1; "
        "checkpointer.step(step)",
        r'checkpointer.progress\["rounds"\]',
    ),
    "variable of a function": (
        "calls = 0\ndef scaled(x):\n    global calls\n    calls += 1\n    return x / calls\n"
        + EPOCHS
        + "for x, y in loader: train(scaled(x), y); step += 1; checkpointer.step(step)",
        r'checkpointer.progress\["calls"\]',
    ),
}
"""Scripts that a restart would not continue, each with what its warning says."""


@pytest.mark.parametrize("name", EXACT)
def test_it_is_exact_and_not_warned_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See the test of this name in `test_repeats`."""
    monkeypatch.setitem(test_repeats.EXACT, name, EXACT[name])
    test_repeats.test_it_is_exact_and_not_warned_of(name, tmp_path, monkeypatch)


def test_a_process_may_run_several_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second script keeps its own private attributes of an optimizer, although the first script had none."""
    run(EPOCHS + f"for batch in loader: {STEP}", tmp_path / "earlier", 0, monkeypatch)
    body = EPOCHS + "for x, y in loader:\n        train(x * optimizer._scale, y); optimizer._scale *= 0.9; step += 1; "
    monkeypatch.setitem(test_repeats.EXACT, "private", f"optimizer._scale = 1.0\n{body}checkpointer.step(step)")
    test_repeats.test_it_is_exact_and_not_warned_of("private", tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ADVICE)
def test_what_a_restart_would_not_continue_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning comes once, before the first save, and names the line that repairs it."""
    body, advice = ADVICE[name]
    _, told = run(body, tmp_path / "whole", 7, monkeypatch)
    assert len(told) == 1 and "would not continue exactly" in told[0]
    assert re.search(advice, told[0])
