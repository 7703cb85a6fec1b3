"""The `mizzen` command: help, exit codes, commands of other distributions, completion, and missing dependencies."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from mizzen_client.cli.app import cli, run
from mizzen_client.cli.exits import MEANINGS, Exit
from mizzen_client.cli.lazy import Lazy
from mizzen_client.cli.session import OutputCommand
from tests.cli.completions import completions

OWN: dict[str, Lazy] = {name: lazy for part in cli.sections.values() for name, lazy in part.items()}


def leaves(name: str, command: click.Command) -> dict[str, click.Command]:
    if not isinstance(command, click.Group):
        return {name: command}
    found: dict[str, click.Command] = {}
    for sub, inner in command.commands.items():
        found |= leaves(f"{name} {sub}", inner)
    return found


def own_commands() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    with click.Context(cli) as context:
        for name in OWN:
            command = cli.get_command(context, name)
            assert command is not None
            found |= leaves(name, command)
    return found


def mizzen(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mizzen.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=30)


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    """Each line of `mizzen --help` has the name and the first sentence of the command's own help."""
    with click.Context(cli) as context:
        for name, lazy in OWN.items():
            command = cli.get_command(context, name)
            assert command is not None and command.name == name
            assert (command.help or "").startswith(lazy.help.removesuffix(".")), name


def test_every_command_has_an_output_format_and_a_context() -> None:
    """Every command has the options `--output`, `--context` and `--patience`, except one that only writes a file."""
    for name, command in own_commands().items():
        if name == "convert":
            continue
        assert isinstance(command, OutputCommand), name
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert {"-o", "--output", "--context", "--patience"} <= flags, name


def test_exit_codes_are_documented(checkout: Path) -> None:
    """Each exit code is in the help and in docs/command.md, with the same description."""
    page = (checkout / "docs/command.md").read_text().replace("\\|", "|")
    shown = mizzen("--help").stdout
    for code in Exit:
        assert f"| {code.value} | {MEANINGS[code]} |" in page
        assert re.search(rf"^ +{code.value}  {re.escape(MEANINGS[code])}$", shown, re.M)


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["ls", "--limit", "x"], ["show"], ["ls", "--label", "x"], ["cancel"], ["submit", "/no/such"]],
)
def test_wrong_usage_is_2_and_leaves_stdout_empty(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid arguments give exit code 2, with an error on stderr and no output on stdout."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err


def test_alone_the_library_has_the_command_which_says_what_to_install(checkout: Path) -> None:
    """Without mizzen-client, its commands are an error that names it, and so are the names of its library."""
    alone = [sys.executable, "-S", "-I", "-c"]
    path = f"import sys; sys.path.insert(0, {str(checkout / 'sdk')!r})"
    for arguments in (["ls"], ["reclaim"], ["--help"], []):
        command = [*alone, f"{path}; from mizzen.cli.main import main; main()", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stdout) == (2, "")
        assert "pip install mizzen-client" in done.stderr and "`mizzen checkpoint`" in done.stderr
    for name in ("from mizzen.client import Client", "import mizzen; mizzen.Executor"):
        done = subprocess.run([*alone, f"{path}; {name}"], capture_output=True, text=True, timeout=30)
        assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr
        assert "pip install mizzen-client" in done.stderr


def test_the_old_name_of_the_client_has_the_same_classes() -> None:
    """`mizzen.client` has the public names of `mizzen_client`, not copies of them."""
    import mizzen.client
    import mizzen_client

    assert mizzen.client.__all__ == dir(mizzen.client) == mizzen_client.__all__
    assert all(getattr(mizzen.client, name) is getattr(mizzen_client, name) for name in mizzen_client.__all__)
    assert mizzen.Executor is mizzen_client.Executor


PLUGIN = '''
import click
import sys
sys.modules["was_imported"] = sys

@click.command()
@click.option("--port", type=int)
def up(port):
    """Start everything here. And more."""
    click.echo(f"up on {port}")
'''


@pytest.fixture
def plugins(tmp_path: Path) -> dict[str, str]:
    """Installs a distribution with a valid command, one whose import fails, and one that is not a click command."""
    info = tmp_path / "server-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: server\nVersion: 1\n")
    entries = "hoist = good_plugin:up\nsnag = bad_plugin:agent\nodd = good_plugin:PLUGIN\nls = good_plugin:up\n"
    (info / "entry_points.txt").write_text(f"[mizzen.commands]\n{entries}")
    (tmp_path / "good_plugin.py").write_text(PLUGIN + "PLUGIN = 1\nprint('imported', file=sys.stderr)\n")
    (tmp_path / "bad_plugin.py").write_text("def agent():\n    '''Run an agent.'''\nraise RuntimeError('no kernel')\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_commands_of_other_distributions_are_listed_without_importing_them(plugins: dict[str, str]) -> None:
    """The help lists commands of other distributions with their first sentences, without importing their modules."""
    done = mizzen("--help", env=plugins)
    assert done.returncode == 0
    assert re.search(r"^  hoist +Start everything here\.$", done.stdout, re.M)
    assert re.search(r"^  snag +Run an agent\.$", done.stdout, re.M)
    assert "imported" not in done.stderr
    assert done.stdout.count("\n  ls ") == 1


def test_a_command_of_another_distribution_runs(plugins: dict[str, str]) -> None:
    """A command of another distribution is imported when it runs, and receives its arguments."""
    assert mizzen("hoist", "--port", "5", env=plugins).stdout == "up on 5\n"


def test_a_broken_plugin_breaks_only_itself(plugins: dict[str, str]) -> None:
    """A command that cannot be loaded is an error that names its distribution; other commands work."""
    done = mizzen("snag", env=plugins)
    assert done.returncode == 70 and done.stdout == ""
    assert "`snag` of server (bad_plugin:agent)" in done.stderr and "no kernel" in done.stderr
    assert "is a int, not a click command" in mizzen("odd", env=plugins).stderr
    assert mizzen("version", env=plugins).returncode == 0


def test_our_own_command_wins_over_a_plugin_of_its_name(plugins: dict[str, str]) -> None:
    """Another distribution cannot replace a command of mizzen."""
    assert "List workloads" in mizzen("ls", "--help", env=plugins).stdout


def test_bash_accepts_the_completion_script(capsys: pytest.CaptureFixture[str]) -> None:
    """The completion script for bash has valid syntax, and there are scripts for zsh and fish."""
    assert run(["completion", "bash"]) == 0
    subprocess.run(["bash", "-n"], input=capsys.readouterr().out, text=True, check=True, timeout=30)
    for shell in ("zsh", "fish"):
        assert run(["completion", shell]) == 0
        assert "_MIZZEN_COMPLETE" in capsys.readouterr().out


def test_completion_offers_commands_without_loading_them() -> None:
    """Completion offers commands, subcommands and options."""
    assert completions([], "s") == ["submit", "show", "serve", "simulate", "spot"]
    assert completions(["machines"], "un") == ["uncordon", "undrain"]
    assert "--label" in completions(["ls"], "--l")


def test_starting_is_quick_because_little_is_imported() -> None:
    """`--help` and `ls` do not import yaml, rich and pygments; `--help` does not import httpx either."""
    code = "import sys; from mizzen_client.cli.app import run; run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    unneeded = {"yaml", "rich", "pygments", "httpx._main"}
    for arguments, also in ((["--help"], {"httpx", "ssl"}), (["ls", "--patience", "0"], set())):
        command = [sys.executable, "-c", code, *arguments]
        environment = {**os.environ, "MIZZEN_API": "http://127.0.0.1:9"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30)
        loaded = set(done.stderr.split())
        assert "click" in loaded and not loaded & (unneeded | also)


def test_numbers_are_finite() -> None:
    """Every option that takes a number refuses `nan` and `inf`, in the commands of the client and of the server."""
    wrong, commands = [], dict[str, click.Command]()
    with click.Context(cli) as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            assert command is not None
            commands |= leaves(name, command)
    assert {"up", "tetris solve", "balance"} <= commands.keys()
    for name, command in commands.items():
        with click.Context(command) as context:
            for option in command.params:
                if isinstance(option.type, click.FloatRange | click.types.FloatParamType):
                    for value in ("nan", "inf"):
                        with contextlib.suppress(click.ClickException):
                            option.process_value(context, value)
                            wrong.append(f"{name} {option.opts[0]} {value}")
    assert not wrong
