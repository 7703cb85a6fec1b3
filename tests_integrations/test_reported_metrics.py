"""What transformers and Lightning log is in the report of the task."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests_integrations.pages import SCRIPTS

CHANGES = {
    "transformers": [('report_to="none"', 'report_to="none", logging_steps=3')],
    "lightning": [
        ("lightning.Trainer(", "lightning.Trainer(log_every_n_steps=3, "),
        ("return nn.functional", "loss = nn.functional"),
        ("batch[1])\n", 'batch[1])\n        self.log("loss", loss)\n        return loss\n'),
    ],
}


@pytest.mark.parametrize("name", CHANGES)
def test_logged_metrics_are_reported(name: str, tmp_path: Path) -> None:
    """The agent finds the loss beside the step."""
    text = SCRIPTS["after", name]
    for old, new in CHANGES[name]:
        assert old in text
        text = text.replace(old, new)
    path, report = tmp_path / "script.py", tmp_path / "report.json"
    path.write_text(text)
    told = {**os.environ, "MIZZEN_REPORT": str(report), "MIZZEN_CHECKPOINT_URI": str(tmp_path / "ckpt")}
    # Not in a forked child: the last report is written at the exit of the interpreter.
    subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=told, check=True)
    found = json.loads(report.read_text())
    assert found["step"] > 0 and 0 < found["metrics"]["loss"] < 100
