"""The example `torchtitan` on a GPU: killed and started again, it trains as without the kill."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

titan = pytest.importorskip("torchtitan")
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(400)]
SCRIPT = Path(__file__).parents[1] / "examples" / "torchtitan" / "train.py"
STEPS = 40


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("assets")
    words = [f"w{number * number % 997}" for number in range(60_000)]
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([" ".join(words)], trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = folder / "text"
    text.mkdir()
    lines = (json.dumps({"text": " ".join(words[at : at + 200])}) for at in range(0, len(words), 200))
    (text / "data.json").write_text("\n".join(lines))
    return folder


def start(assets: Path, folder: Path, root: Path, *options: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    given = {
        "model.name": "llama3", "model.flavor": "debugmodel", "model.hf_assets_path": str(assets),
        "training.dataset": "c4_test", "training.dataset_path": str(assets / "text"), "training.steps": str(STEPS),
        "training.seq_len": "1024", "training.local_batch_size": "64", "metrics.log_freq": "1",
        "debug.seed": "1", "checkpoint.interval": "5", "job.dump_folder": str(folder),
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in given.items()]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # What torchrun sets. It would be the parent of the process to kill.
    gang = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ = {**os.environ, **gang, "MIZZEN_CHECKPOINT_URI": str(root), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *flags, "--debug.deterministic", "--checkpoint.enable", *options],
        env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def losses(output: str) -> dict[int, tuple[str, str]]:
    """Return loss and norm of the gradient by step."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    found = re.findall(r"step:\s*(\d+)\s+loss:\s*(\S+)\s+grad_norm:\s*(\S+)", plain)
    return {int(step): (loss, norm) for step, loss, norm in found}


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_killed_training_goes_on_exactly(assets: Path, tmp_path: Path, mode: str) -> None:
    """Losses and gradients after SIGKILL, after a notice and without either are the same."""
    option = f"--checkpoint.async_mode={mode}"
    whole = start(assets, tmp_path / "whole", tmp_path / "a", option)
    expected = losses(whole.communicate()[0])
    assert whole.returncode == 0 and sorted(expected) == list(range(1, STEPS + 1))
    found: dict[int, tuple[str, str]] = {}
    firsts = []
    for at, number in ((12, signal.SIGKILL), (23, signal.SIGTERM), (STEPS, None)):
        process = start(assets, tmp_path / "killed", tmp_path / "b", option)
        output = ""
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if number is not None and losses(output).get(at):
                process.send_signal(number)
                number = None
        process.wait()
        steps = losses(output)
        assert steps and process.returncode in (0, 143, -signal.SIGKILL), output
        firsts.append(min(steps))
        found |= steps
    print(mode, firsts)
    assert found == expected
    assert firsts[0] == 1 and firsts[1] in (6, 11, 16) and firsts[2] > 23, firsts
