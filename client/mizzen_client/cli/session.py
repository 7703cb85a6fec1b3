"""Shared parts of all commands: the options -o, --context and --patience, the client, messages and completion.

Data goes to stdout; everything else goes to stderr.
"""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

from mizzen.cli.printer import say as say
from mizzen.cli.values import FORMATS, BadValue, seconds
from mizzen_client.cli import formats
from mizzen_client.cli.exits import Exit, exit_of
from mizzen_client.cli.numbers import Number
from mizzen_client.errors import ApiError, ClientError

if TYPE_CHECKING:
    from mizzen_client.cli.name_cache import NamedItem
    from mizzen_client.client import Client
    from mizzen_client.views import Workload

F = TypeVar("F", bound=Callable[..., Any])

_NOTICE_EVERY_S = 10.0
_LONG_S = 120.0
_COMPLETION_S = 1.0
_COMPLETED = 200
LIVE_PHASES = (
    "running", "checkpointing", "provisioning", "migrating", "placing", "preempted", "pending", "held", "blocked",
)  # fmt: skip
"""What the command shows as the phases of workloads that have not ended, in the order of `mizzen top`."""


@dataclass
class Session:
    """The options and the client of one run of the command."""

    output: str = "table"
    context: str | None = None
    patience_s: float = 30.0
    room_patience_s: float | None = None
    """How long to retry while the tenant's queue is full; None: the client's default."""
    _client: "Client | None" = None
    _noticed_at_s: float = field(default=float("-inf"))
    _resolved: dict[str, str] = field(default_factory=dict)

    @property
    def client(self) -> "Client":
        """The client for the chosen context."""
        if self._client is None:
            room = {} if self.room_patience_s is None else {"room_patience_s": self.room_patience_s}
            self._client = client_class().from_environment(
                self.context, patience_s=self.patience_s, on_retry=self._notice, on_expiry=say_expiry, **room
            )
            click.get_current_context().call_on_close(self._client.close)
        return self._client

    def resolve(self, reference: str) -> str:
        """Return the id of the workload to which `reference` refers, for reading: the newest one with a name.

        A later call of the same command returns the same id and does not print the note again.
        """
        from mizzen_client.references import resolve_newest

        def note(newest: "Workload") -> None:
            say(f"several workloads are named {reference!r}; this is the newest, {newest['id']} ({newest['phase']})")

        if reference not in self._resolved:
            self._resolved[reference] = resolve_newest(self.client, reference, note)
        return self._resolved[reference]

    def resolve_to_change(self, reference: str) -> str:
        """Return the id of the workload to which `reference` refers, for an action that changes the workload.

        If several live workloads have the name, ask whether the newest is meant; without a terminal this is an error.
        """
        from mizzen_client.references import listed, resolve

        def ask(found: "list[Workload]") -> "Workload | None":
            if not sys.stdin.isatty():
                return None
            confirm(f"{reference!r} matches {listed(found)}. Do you mean the newest, {found[0]['id']}?", yes=False)
            return found[0]

        return resolve(self.client, reference, ask)

    def _notice(self, error: str, left_s: float) -> None:
        if time.monotonic() >= self._noticed_at_s + _NOTICE_EVERY_S:
            self._noticed_at_s = time.monotonic()
            say(f"{error}; retrying for {f'{left_s:.0f} s' if left_s < _LONG_S else formats.duration(left_s)} more")

    def each(self, references: tuple[str, ...], act: Callable[[str], Any]) -> tuple[list[Any], int]:
        """Call `act`, which changes a workload, with the workload id of each reference; see `each_name`."""
        return self.each_name(references, lambda reference: act(self.resolve_to_change(reference)))

    def each_name(self, names: tuple[str, ...], act: Callable[[str], Any]) -> tuple[list[Any], int]:
        """Call `act` with each name. A failure is reported and does not stop the others.

        Returns the results of `act`, and the exit code of the first failure or 0.
        """
        done, code = [], 0
        for name in names:
            try:
                done.append(act(name))
            except ClientError as error:
                complain(error, f"{name}: ")
                code = code or exit_of(error)
        return done, code


def client_class() -> "type[Client]":
    """Import and return the class `Client`."""
    # httpx imports its own command line, with rich and pygments, if these are installed. This takes twice as long as
    # the rest of httpx and is not needed, so the import is blocked: a command runs for only about 0.1 s.
    blocked = "httpx" not in sys.modules
    if blocked:
        sys.modules["httpx._main"] = None  # type: ignore[assignment]
    try:
        from mizzen_client.client import Client
    finally:
        if blocked:
            del sys.modules["httpx._main"]
    return Client


def finish(code: int) -> NoReturn:
    """End the command with this exit code."""
    raise click.exceptions.Exit(code)


def say_expiry(expires_at: str) -> None:
    """Warn that the API key expires soon."""
    at = formats.clock(expires_at)
    say(f"the API key expires in {formats.until(expires_at)}, at {at}: ask an operator for a new one")


def complain(error: ClientError, prefix: str = "") -> None:
    """Print an error, or the problems of an invalid document, one per line."""
    if isinstance(error, ApiError) and error.errors:
        for problem in error.errors:
            click.echo(formats.visible(f"{prefix}{problem}"), err=True)
    else:
        say(f"{prefix}{error}")


def interrupted(hint: str) -> NoReturn:
    """End a command that Ctrl-C interrupted while it waited or followed. `hint` says how to resume."""
    click.echo(err=True)
    say(hint)
    finish(Exit.INTERRUPTED)


class OutputCommand(click.Command):
    """A command with the shared options. `default_output` is its output format without -o."""

    def __init__(self, *args: Any, default_output: str = "table", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(
                ["-o", "--output"],
                type=click.Choice(FORMATS),
                default=default_output,
                show_default=True,
                help="The output format.",
                expose_value=False,
                callback=_keep("output"),
            ),
            click.Option(
                ["--context"],
                metavar="NAME",
                help="The saved context to use.",
                expose_value=False,
                callback=_keep("context"),
                shell_complete=complete_context,
            ),
            click.Option(
                ["--patience"],
                type=Number(min=0),
                default=30.0,
                metavar="SECONDS",
                show_default=True,
                help="How long to retry requests while the API does not respond.",
                expose_value=False,
                callback=_keep("patience_s"),
            ),
        ]


def _keep(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(context: click.Context, _: click.Parameter, value: Any) -> None:
        setattr(context.ensure_object(Session), name, value)

    return keep


class Commands(click.Group):
    """A group of commands. Without a command's name it runs `list`, if the group has that command."""

    command_class = OutputCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        is_bare = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        if is_bare and "list" in self.commands and not ctx.resilient_parsing:
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of their definition."""
        return list(self.commands)


def labels(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Option callback: converts repeated `key=value` values to a mapping."""
    out = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not of the form key=value", context, parameter)
        out[key] = text
    return out


def duration(above_zero: bool) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """Return an option callback that converts a duration such as `90s`, `1h30m`, `2d` or `90` to seconds."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            return seconds(text, above_zero)
        except BadValue as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return read


def label_option(does: str) -> Callable[[F], F]:
    """Return the option --label, the argument `labels_`. `does` is the help text about its effect."""
    return click.option(
        "--label", "labels_", multiple=True, callback=labels, metavar="KEY=VALUE", help=f"{does} (repeatable)."
    )


def limit_option(what: str, least: int = 1, most: int | None = None) -> Callable[[F], F]:
    """Return the option --limit, by default 100. `what` names the limited items in its help."""
    kind = click.IntRange(least, most)
    return click.option("-n", "--limit", type=kind, default=100, show_default=True, help=f"Maximum number of {what}.")


def split_place(place: str, form: str) -> tuple[str, str]:
    """Return region and name of a place that is given in the form `REGION/NAME`.

    Raises:
        click.BadParameter: it is not of this form.
    """
    region, slash, name = place.partition("/")
    if not slash or not name or "/" in name:
        raise click.BadParameter(f"{place!r} is not of the form {form}", param_hint=form)
    return region, name


def complete_context(_: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the saved contexts that start with `incomplete`."""
    from mizzen_client.contexts import load_contexts

    try:
        return [name for name in sorted(load_contexts().named) if name.startswith(incomplete)]
    except ClientError:
        return []


def _completing(
    kind: str, found: "Callable[[Client], Iterable[str | NamedItem]]"
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a completion function for names that the API lists. `kind` describes them, for the shell."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from mizzen_client.cli.name_cache import kept_names
        from mizzen_client.contexts import active_context

        session = context.find_object(Session) or Session()

        def fetch() -> "list[NamedItem]":
            with client_class().from_environment(session.context, patience_s=0, answer_s=_COMPLETION_S) as client:
                return [(one, None) if isinstance(one, str) else one for one in found(client)]

        try:
            names = kept_names(active_context(session.context), kind, fetch)
        except Exception:  # A failed completion must not print to the user's prompt.
            return []
        return [CompletionItem(name, help=what) for name, what in names if name.startswith(incomplete)]

    return complete


def _workloads(client: "Client") -> "list[str | NamedItem]":
    """Return ids, each with its kind, and names of workloads."""
    found = list(client.workloads(limit=_COMPLETED))
    ids = ((w["id"], f"{w['name']} {w['phase']}") for w in found)
    return [*ids, *sorted({w["name"] for w in found})]


complete_workload = _completing("workload", _workloads)
complete_name = _completing("name", lambda client: sorted({w["name"] for w in client.workloads(limit=_COMPLETED)}))
complete_machine = _completing("machine", lambda client: [machine["id"] for machine in client.machines()])
complete_tenant = _completing("tenant", lambda client: [tenant["name"] for tenant in client.tenants()])
complete_table = _completing("table", lambda client: [table["name"] for table in client.tables()])
complete_region = _completing("region", lambda client: [region["name"] for region in client.regions()])
complete_pool = _completing("pool", lambda client: [f"{p['region']}/{p['name']}" for p in client.pools()])
complete_pool_name = _completing("pool name", lambda client: sorted({p["name"] for p in client.pools()}))
complete_service = _completing("service", lambda client: [service["name"] for service in client.services()])
complete_cluster = _completing("cluster", lambda client: [f"{c['region']}/{c['name']}" for c in client.clusters()])


def complete_phase(_: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the phases, and the other values of --phase, that start with `incomplete`."""
    from mizzen_client.views import TERMINAL_PHASES

    return [name for name in ("live", *LIVE_PHASES, *sorted(TERMINAL_PHASES)) if name.startswith(incomplete)]


TABLE = click.argument("name", shell_complete=complete_table)
REGION = click.argument("region", shell_complete=complete_region)
WORKLOAD = click.argument("workload", shell_complete=complete_workload)
WORKLOADS = click.argument("workloads", nargs=-1, required=True, shell_complete=complete_workload)


def confirm(question: str, yes: bool) -> None:
    """Ask the user to confirm an action that cannot be undone, unless `yes` (`--yes`) is set.

    Raises:
        click.UsageError: stdin is not a terminal.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Use --yes to confirm if stdin is not a terminal")
    click.confirm(formats.visible(question), abort=True, err=True)


def stdin_text(what: str, prompt: str) -> str:
    """Prompt for a line with hidden input; without a terminal, return all of stdin without the last line end."""
    if sys.stdin.isatty():
        return str(click.prompt(prompt, hide_input=True, err=True))
    text = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not text:
        raise click.UsageError(f"{what}: stdin is empty")
    return text
