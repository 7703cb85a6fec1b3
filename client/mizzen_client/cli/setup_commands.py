"""The commands `login` and `contexts`, which select the API to use; `console`, `completion` and `version`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click
from click.shell_completion import get_completion_class

from mizzen import __version__
from mizzen.cli.printer import Column, emit_list, emit_one
from mizzen_client.cli.session import (
    Commands,
    OutputCommand,
    Session,
    client_class,
    complete_context,
    say,
    say_expiry,
    stdin_text,
)
from mizzen_client.cli.start import COMPLETE_VARIABLE
from mizzen_client.contexts import Context, load_contexts, save_contexts
from mizzen_client.errors import NotConfigured

if TYPE_CHECKING:
    from mizzen_client.device import Login


def _device_login(url: str, ca: str | None, *, is_needed: bool) -> "Login | None":
    from mizzen_client.device import log_in, login_settings

    settings = login_settings(url, ca)
    if settings is None:
        if is_needed:
            raise NotConfigured(f"{url} has no issuer for logins; use an API key (--key -)")
        return None

    def show(page: str, code: str) -> None:
        say(f"open {page} in a browser, and confirm the code {code}")

    return log_in(settings, ca, show)


@click.command(cls=OutputCommand)
@click.argument("url")
@click.option(
    "--key",
    envvar="MIZZEN_API_KEY",
    help="The API key; `-` reads it from stdin. If it is not given, the command prompts for it.",
)
@click.option("--ca", envvar="MIZZEN_API_CA", help="PEM file with authorities to trust in addition to the system's.")
@click.option(
    "--device/--no-device",
    default=None,
    help="Log in at the API's issuer in a browser (default: in a terminal without --key, if the API has an issuer).",
)
@click.pass_obj
def login(session: Session, url: str, key: str | None, ca: str | None, device: bool | None) -> None:
    """Check the URL and key of an API, and save them.

    They are saved as a context, which becomes the current one. Its name is the value of `--context`, or the API's host
    name. Other users of the machine can see a key on the command line: use `--key -` instead.
    """
    ca = None if ca is None else str(Path(ca).absolute())
    issued = None
    if device or (device is None and key is None and sys.stdin.isatty()):
        issued = _device_login(url, ca, is_needed=bool(device))
    if issued is None and key in (None, "-"):
        key = stdin_text("--key", "API key")
    key = key if issued is None else None
    with client_class()(
        url, key if issued is None else issued.token, ca=ca, patience_s=session.patience_s, on_expiry=say_expiry
    ) as client:
        identity = client.whoami()
    host = urlsplit(url).hostname or url
    if url.startswith("http://") and host not in ("localhost", "127.0.0.1", "::1"):
        say(f"the API key is sent unencrypted to {host}: use https instead")
    chosen = session.context or host
    path = save_contexts(load_contexts().with_context(chosen, Context(url.rstrip("/"), key, ca, issued)))
    whose = f"tenant {identity['tenant']}" if identity.get("tenant") else identity.get("machine") or "all tenants"
    say(f"saved in {path}")
    body = {"context": chosen, "api": url, **identity}
    emit_one(session, body, lambda: f"{chosen}: {url}, {identity['role']} of {whose}", name=chosen)


_COLUMNS = (
    Column("CURRENT", lambda c: "*" if c["in_use"] else ""),
    Column("NAME", lambda c: c["name"]),
    Column("API", lambda c: c["api"]),
)


@click.group(cls=Commands)
def contexts() -> None:
    """List, select and remove saved contexts."""


@contexts.command("list")
@click.pass_obj
def list_(session: Session) -> None:
    """List the saved contexts without their keys."""
    saved = load_contexts()
    items = [{"name": n, "api": c.api, "in_use": n == saved.current} for n, c in sorted(saved.named.items())]
    emit_list(session, items, _COLUMNS, name=lambda c: str(c["name"]))


@contexts.command()
@click.argument("name", shell_complete=complete_context)
@click.pass_obj
def use(session: Session, name: str) -> None:
    """Make a context the current one."""
    save_contexts(load_contexts().using(name))
    emit_one(session, {"context": name}, lambda: name, name=name)


@contexts.command()
@click.argument("name", shell_complete=complete_context)
@click.pass_obj
def rm(session: Session, name: str) -> None:
    """Remove a context and its key."""
    save_contexts(load_contexts().without(name))
    emit_one(session, {"removed": name}, lambda: name, name=name)


def open_browser(url: str) -> bool:
    """Open a page in a browser with a window; return whether there was one."""
    import webbrowser

    has_window = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return has_window and webbrowser.open(url)


@click.command(cls=OutputCommand)
@click.option("--open/--no-open", "opens", default=True, help="Open it in a browser, if there is a window system.")
@click.pass_obj
def console(session: Session, opens: bool) -> None:
    """Open the console in a browser, already logged in with your API key.

    The printed link works once, within five minutes. Keep it secret: it logs in any browser that opens it.
    """
    link = session.client.console_link()
    emit_one(session, {"link": link}, lambda: link, name=link)
    if opens and open_browser(link):
        say("opened in a browser")


@click.command(cls=OutputCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_obj
def completion(session: Session, shell: str) -> None:
    r"""Print the completion script of a shell.

    \b
    bash:  eval "$(mizzen completion bash)"            in ~/.bashrc
    zsh:   eval "$(mizzen completion zsh)"             in ~/.zshrc, after compinit
    fish:  mizzen completion fish > ~/.config/fish/completions/mizzen.fish
    """
    from mizzen_client.cli.app import cli

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
