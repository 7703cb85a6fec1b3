"""Saved contexts: API addresses and keys."""

import stat
from pathlib import Path

import pytest

from mizzen_client import NotConfigured, active_context
from mizzen_client.cli.app import run
from mizzen_client.contexts import Context, Contexts, config_path, load_contexts, save_contexts


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("MIZZEN_API", "MIZZEN_API_KEY", "MIZZEN_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


TWO = Contexts("a", {"a": Context("http://a", "key-a"), "b": Context("http://b", "key-b")})


def test_contexts_are_saved_for_their_owner_only() -> None:
    """Saved contexts load unchanged; only the owner can access the file and its folder; no temporary file remains."""
    path = save_contexts(TWO)
    assert load_contexts() == TWO
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    save_contexts(TWO)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and list(path.parent.iterdir()) == [path]


def test_the_flag_wins_over_the_environment_and_that_over_the_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is --context, MIZZEN_API, MIZZEN_CONTEXT, current context. MIZZEN_API_KEY alone replaces the key."""
    save_contexts(TWO)
    assert active_context() == TWO.named["a"]
    monkeypatch.setenv("MIZZEN_API_KEY", "other")
    assert active_context() == Context("http://a", "other")
    assert active_context("b") == TWO.named["b"]
    monkeypatch.setenv("MIZZEN_CONTEXT", "b")
    assert active_context() == Context("http://b", "other")
    monkeypatch.setenv("MIZZEN_API", "http://env")
    assert active_context() == Context("http://env", "other")
    assert active_context("b") == TWO.named["b"]


def test_contexts_are_listed_used_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    """The list marks the current context and shows no keys. After the current context is removed, there is none."""
    save_contexts(TWO)
    assert run(["contexts", "use", "b"]) == 0
    assert run(["contexts", "list"]) == 0
    out = capsys.readouterr().out
    assert "*        b     http://b" in out and "key-" not in out
    assert run(["contexts", "rm", "b"]) == 0
    assert load_contexts() == Contexts(None, {"a": TWO.named["a"]})
    assert run(["contexts", "use", "nope"]) == 2
    assert "there is no context 'nope'" in capsys.readouterr().err


def test_without_an_api_the_user_is_told_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a saved context and environment variables, the exit code is 2 and the error says how to log in."""
    assert run(["ls"]) == 2
    assert "mizzen login URL" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "contexts: 3", "contexts: {a: 3}", "a: [", "contexts: {a: {api: 3}}"])
def test_a_broken_file_is_named(text: str) -> None:
    """An invalid contexts file is an error that starts with its path."""
    config_path().parent.mkdir()
    config_path().write_text(text)
    with pytest.raises(NotConfigured, match=str(config_path())):
        load_contexts()
