"""`mizzen pilots`: a user of a Slurm cluster starts machines as own jobs, which serve only the user's tenant.

The agents run as this user and connect to the gateway with a machine's key. An operator of the cluster is not needed.
"""

import os
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from domain.units import parse_duration_s, parse_size_bytes
from infra.errors import MizzenError
from mizzen.cli.printer import Column, emit_list, say
from mizzen_client.cli import formats
from mizzen_client.cli.session import Commands, Session, finish
from server.commands import run_command
from server.options import FILE, included, option, takes

if TYPE_CHECKING:
    from capacity.providers.slurm import SlurmProvider

T = TypeVar("T")
_PREFIX = "pilot-"
_NODE = ("cpus", "memory", "gpus", "gpu_type", "gres")
"""The options of jobs that describe a node."""
_SETTING = re.compile(r"^(?:partitions\.jobs\.|machine_types\.node\.)?(?P<name>[a-z_]+)(?=:)")
_QUEUED_S = 7 * 86400
"""How long a job may wait in Slurm's queue: the key is valid for this time plus the job's time limit."""
_LONGEST_S = 53 * 86400
"""The longest time limit of jobs: keys of pilots are valid for at most 60 days."""
_FOLDER = "~/.mizzen/pilots"
_FOLDER_VARIABLE = "MIZZEN_PILOTS_FOLDER"
_COLUMNS = (
    Column("PILOT", lambda p: p["pilot"]),
    Column("JOB", lambda p: p["job"] or "-"),
    Column("STATE", lambda p: p["state"], flexible=True),
    Column("ENDS", lambda p: "-" if p["ends_at"] is None else formats.until(p["ends_at"]), right=True),
    Column("ISOLATION", lambda p: p["isolation"] or "-"),
    Column("WHY", lambda p: p["isolation_why"] or "-", drop=1, flexible=True),
    Column("MACHINE", lambda p: p["machine"] or "-", wide=True),
)


def _parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str], T]:
    """Returns an option callback that parses the value."""

    def checked(_: click.Context, _parameter: click.Parameter, value: str) -> T:
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(f"{value}: {error}") from None

    return checked


def _time_limit_s(text: str) -> float:
    if (time_s := parse_duration_s(text)) > _LONGEST_S:
        raise ValueError(f"must be at most {_LONGEST_S // 86400}d")
    return time_s


def _address(text: str) -> str:
    if re.fullmatch(r"[^\s:]+:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5}", text) is None:
        raise ValueError("must be HOST:PORT, such as gateway.example.org:7443")
    return text


@dataclass(frozen=True)
class PilotJobOptions:
    """The options of `sbatch`, and the resources of a job."""

    partition: str = option(required=True, help="Slurm's partition.")
    time_s: float = option(
        "--time", default="4h", callback=_parsed(_time_limit_s), help="Time limit of the jobs, such as 4h."
    )
    cpus: int = option(default=1, type=click.IntRange(min=1), show_default=True, help="CPUs of each job.")
    memory: int = option(
        type=str, default="4GiB", callback=_parsed(parse_size_bytes), show_default=True, help="Memory of each job."
    )
    gpus: int = option(default=0, type=click.IntRange(0, 62), help="GPUs of each job.")
    gpu_type: str | None = option(help="GPU type as in workload documents, such as a100.")
    gres: str | None = option(help="Value of --gres of sbatch (default: gpu:N).")
    account: str | None = option(help="As for sbatch.")
    qos: str | None = option(help="As for sbatch.")
    constraint: str | None = option(help="As for sbatch.")
    reservation: str | None = option(help="As for sbatch.")
    exclude: str | None = option(help="As for sbatch.")


@dataclass(frozen=True)
class PilotOptions:
    """The options of `mizzen pilots --slurm`."""

    slurm: bool = option(is_flag=True, required=True, help="The jobs are Slurm's.")
    nodes: int = option(required=True, type=click.IntRange(1, 1000), help="Number of jobs; each is one machine.")
    region: str = option(required=True, help="The region that the machines join.")
    gateway: str = option(
        required=True, envvar="MIZZEN_GATEWAY", metavar="HOST:PORT", callback=_parsed(_address),
        help="Address of the gateway.",
    )  # fmt: skip
    gateway_ca: Path | None = option(type=FILE, envvar="MIZZEN_GATEWAY_CA", help="Its CA certificate.")
    tenant: str | None = option(help="The tenant (default: that of the API key).")
    address: str = option(default="$(hostname -f)", show_default=True, help="Address at which nodes reach each other.")
    state_dir: Path = option(type=click.Path(path_type=Path), default=Path("/tmp"), help="Local folder of the nodes.")
    folder: str = option(
        default=_FOLDER, show_default=True, envvar=_FOLDER_VARIABLE, help="Folder for keys and logs that nodes share."
    )
    prepare: str = option(default="", help="Shell commands before the agent, such as 'module load python'.")
    job: PilotJobOptions = included(PilotJobOptions)


class PilotCommands(Commands):
    """The group `mizzen pilots`: options without a subcommand start pilots; without arguments, it lists them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command.parse_args`."""
        is_start = bool(args) and args[0].startswith("-") and args[0] not in ctx.help_option_names
        return super().parse_args(ctx, [*(["start"] if is_start else [] if args else ["ls"]), *args])


@click.group(cls=PilotCommands)
def pilots() -> None:
    """Start machines as own jobs of a Slurm cluster, which serve only your tenant; list and stop them.

    Workloads use them with `capacity: [own]`.
    """


@pilots.command("start")
@takes(PilotOptions)
def start(given: PilotOptions) -> None:
    """Start pilots. `mizzen pilots --slurm ...` is the same."""
    session: Session = click.get_current_context().ensure_object(Session)
    run_command(lambda: _start(session, given), finish)


@pilots.command("ls")
@click.option("--tenant", help="The tenant (default: that of the API key).")
@click.pass_obj
def list_pilots(session: Session, tenant: str | None) -> None:
    """List pilots, with the state of their jobs, and how tasks are separated on them."""
    run_command(lambda: emit_list(session, _rows(session, tenant), _COLUMNS, name=lambda p: p["pilot"]), finish)


@pilots.command("stop")
@click.argument("names", nargs=-1, metavar="[PILOT]...")
@click.option("--all", "every", is_flag=True, help="All pilots of the tenant.")
@click.option("--tenant", help="The tenant (default: that of the API key).")
@click.pass_obj
def stop(session: Session, names: tuple[str, ...], every: bool, tenant: str | None) -> None:
    """Stop pilots: their tasks save, then the jobs end."""
    if every == bool(names):
        raise click.UsageError("name the pilots to stop, or give --all")
    run_command(lambda: _stop(session, names, tenant), finish)


def _start(session: Session, given: PilotOptions) -> None:
    from capacity.provider import LaunchRefused, LaunchRequest, ProviderUnavailable

    provider = _provider(given)
    (offer,) = provider.offers()
    for _ in range(given.nodes):
        name = _PREFIX + secrets.token_hex(6)
        made = session.client.add_pilot(given.region, name, round(given.job.time_s) + _QUEUED_S, given.tenant)
        request = LaunchRequest(name, made["machine"], offer, made["bucket_url"], "", made["key"])
        try:
            job = provider.launch(request)
        except (LaunchRefused, ProviderUnavailable) as error:
            # It may be unknown whether Slurm has accepted the job. If it has, the job ends at once without its key.
            session.client.stop_pilot(given.region, name, given.tenant)
            raise MizzenError(f"{name}: {error}") from None
        click.echo(f"{name} job {job.partition('.')[0]}")
    say("they serve only your tenant; workloads use them with `capacity: [own]`")


def _rows(session: Session, tenant: str | None) -> list[dict[str, Any]]:
    """Returns this user's jobs and the tenant's pilots, joined by their names."""
    with _asking_slurm():
        jobs = {found.instance: found for found in _provider().describe()}
    known = {pilot["machine"].rpartition("/")[2]: pilot for pilot in session.client.pilots(tenant)}
    rows = []
    for name in sorted({*jobs, *known}):
        job, pilot = jobs.get(name), known.get(name)
        machine = None if pilot is None else pilot["state"]
        state = None if job is None else job.ended or job.waits
        rows.append(
            {
                "pilot": name,
                "job": None if job is None else job.native_id.partition(".")[0],
                "state": state or machine or ("no job of yours" if job is None else "starting"),
                "ends_at": None if job is None or job.ends_at_s is None else _instant(job.ends_at_s),
                "isolation": None if pilot is None else pilot["isolation"],
                "isolation_why": None if pilot is None else pilot["isolation_why"],
                "machine": None if pilot is None else pilot["machine"],
            }
        )
    return rows


def _instant(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def _stop(session: Session, names: Sequence[str], tenant: str | None) -> int:
    provider = _provider()
    with _asking_slurm():
        jobs = {found.instance: found.native_id for found in provider.describe() if found.ended is None}
    known = {pilot["machine"].rpartition("/")[2]: pilot["machine"] for pilot in session.client.pilots(tenant)}
    code = 0
    if not names:
        for name in sorted(jobs.keys() - known.keys()):
            say(f"{name}: a job of yours, but no pilot of this tenant; name it to stop it")
    for name in names or sorted(known):
        if name not in jobs and name not in known:
            say(f"{name}: no such pilot of the tenant, and no such job of yours; see `mizzen pilots ls`")
            code = 1
        if name in known:
            session.client.stop_pilot(known[name].partition("/")[0], name, tenant)
        if name in jobs:
            with _asking_slurm():
                provider.terminate(jobs[name])
    return code


def _provider(given: PilotOptions | None = None) -> "SlurmProvider":
    """Returns the provider of this user's Slurm jobs. Without `options` it cannot launch jobs.

    Raises:
        ConfigurationError: an option is not valid.
    """
    from pydantic import ValidationError

    from capacity.providers.slurm import SettingsOf, SlurmProvider
    from infra.documents import problem_lines
    from infra.errors import ConfigurationError

    folder = Path(os.environ.get(_FOLDER_VARIABLE, _FOLDER) if given is None else given.folder).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--folder: {error}") from None
    body: dict[str, Any] = {"region": "none", "folder": str(folder), "agent": "false", "partitions": {"jobs": {}}}
    body["machine_types"] = {"node": {}}
    if given is not None:
        of = given.job
        names = "partition", "time_s", "account", "qos", "constraint", "reservation", "exclude"
        body["partitions"] = {"jobs": {name: getattr(of, name) for name in names}}
        body["machine_types"] = {"node": {name: getattr(of, name) for name in _NODE}}
        ca = [] if given.gateway_ca is None else ["--temporal-ca", str(given.gateway_ca.resolve())]
        mizzen = str(Path(sys.argv[0]).absolute())  # This command: nodes see the home folder, too.
        agent = shlex.join([mizzen, "agent", "--temporal", given.gateway, *ca])
        body |= {"region": given.region, "agent": agent}
        body |= {"address": given.address, "state_dir": str(given.state_dir), "prepare": given.prepare}
        body["leave_s"] = min(120.0, max(60.0, of.time_s / 2))
    try:
        return SlurmProvider("slurm", SettingsOf.model_validate(body), "pilots")
    except ValidationError as error:
        lines = (_SETTING.sub(_option_of, line) for line in problem_lines(SettingsOf, error))
        raise ConfigurationError("; ".join(lines)) from None


def _option_of(setting: re.Match[str]) -> str:
    return "--" + setting["name"].removesuffix("_s").replace("_", "-")


@contextmanager
def _asking_slurm() -> Iterator[None]:
    from capacity.provider import ProviderUnavailable

    try:
        yield
    except ProviderUnavailable as error:
        raise MizzenError(str(error)) from None
