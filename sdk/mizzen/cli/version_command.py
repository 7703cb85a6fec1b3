"""The commands `completion` and `version`."""

import click
from click.shell_completion import get_completion_class

from mizzen import __version__
from mizzen.cli.plain.printer import emit_one
from mizzen.cli.session import OutputCommand, Session

_SHELLS = ("bash", "zsh", "fish")


@click.command(cls=OutputCommand)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_obj
def completion(session: Session, shell: str) -> None:
    r"""Print the completion script of a shell.

    \b
    bash:  eval "$(mizzen completion bash)"            in ~/.bashrc
    zsh:   eval "$(mizzen completion zsh)"             in ~/.zshrc, after compinit
    fish:  mizzen completion fish > ~/.config/fish/completions/mizzen.fish
    """
    from mizzen.cli.app import COMPLETE_VARIABLE, cli

    kind = get_completion_class(shell)
    assert kind is not None
    # `source()` is not used because it starts bash to check its version.
    instance = kind(cli, {}, "mizzen", COMPLETE_VARIABLE)
    script = instance.source_template % instance.source_vars()
    emit_one(session, {"shell": shell, "script": script}, lambda: script, name=shell)


@click.command(cls=OutputCommand)
@click.pass_obj
def version(session: Session) -> None:
    """Print the version of the command."""
    emit_one(session, {"name": "mizzen", "version": __version__}, lambda: f"mizzen {__version__}", name=__version__)
