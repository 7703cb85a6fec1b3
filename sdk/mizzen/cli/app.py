"""The application: its sections of commands, and running it to an exit code."""

import os
import sys
from collections.abc import Sequence

import click

from mizzen import __version__
from mizzen.cli.exits import Exit, exit_of, table
from mizzen.cli.lazy import Lazy, LazyGroup
from mizzen.cli.session import Session, complain
from mizzen.client.errors import ClientError

COMPLETE_VARIABLE = "_MIZZEN_COMPLETE"
"""Set by the completion scripts, which call the command with it to ask for completions."""
_EPILOG = f"""\b
Exit codes:
{table()}

Data goes to stdout and everything else to stderr. `-o json` works with every command. MIZZEN_API and MIZZEN_API_KEY, or
what `mizzen login` saved, say which API is used."""


class _Application(LazyGroup):
    sections = {
        "Workloads": {
            "submit": Lazy("mizzen.cli.submitting:submit", "Submit workload documents."),
            "wait": Lazy("mizzen.cli.submitting:wait", "Wait until workloads have ended."),
            "ls": Lazy("mizzen.cli.reading:ls", "List workloads."),
            "show": Lazy("mizzen.cli.reading:show", "Show one workload with its attempts."),
            "why": Lazy("mizzen.cli.reading:why", "Say why a workload is where it is, or why it waits."),
            "logs": Lazy("mizzen.cli.following:logs", "Print what a workload's tasks wrote."),
            "events": Lazy("mizzen.cli.following:events", "Print what happened to a workload, or to all."),
            "cancel": Lazy("mizzen.cli.acting:cancel", "Cancel workloads."),
            "hold": Lazy("mizzen.cli.acting:hold", "Keep workloads in the queue until they are released."),
            "release": Lazy("mizzen.cli.acting:release", "Let held workloads go on."),
            "lower": Lazy("mizzen.cli.acting:lower", "Lower a workload's priority."),
            "preempt": Lazy("mizzen.cli.acting:preempt", "Send workloads back to the queue after a checkpoint."),
        },
        "The fleet": {
            "queue": Lazy("mizzen.cli.reading:queue", "Show the queue in its order."),
            "regions": Lazy("mizzen.cli.fleet:regions", "List regions; set what they may hold."),
            "clusters": Lazy("mizzen.cli.fleet:clusters", "List clusters; set their prices."),
            "machines": Lazy("mizzen.cli.fleet:machines", "List machines; cordon or drain them."),
            "pools": Lazy("mizzen.cli.pools:pools", "List pools; set how many machines they have."),
            "instances": Lazy("mizzen.cli.pools:instances", "List machines that were asked of providers; end them."),
            "costs": Lazy("mizzen.cli.fleet:costs", "Show what workloads cost."),
            "export": Lazy("mizzen.cli.fleet:export", "Write a snapshot of the fleet for the simulator."),
            "tables": Lazy("mizzen.cli.tables:tables", "List input tables; add, append or copy them."),
            "tenants": Lazy("mizzen.cli.tenants:tenants", "List tenants; set their quotas and secrets."),
            "keys": Lazy("mizzen.cli.tenants:keys", "List, create and revoke API keys."),
            "audit": Lazy("mizzen.cli.tenants:audit", "Show who changed what."),
        },
        "Training code": {
            "cadence": Lazy("mizzen.cli.passing:cadence", "Explain how often to save."),
            "checkpoint": Lazy("mizzen.cli.passing:checkpoint", "List, check and export checkpoints."),
        },
        "This command": {
            "login": Lazy("mizzen.cli.login:login", "Check the address and key of an API, and save them."),
            "contexts": Lazy("mizzen.cli.login:contexts", "List, use and remove saved contexts."),
            "completion": Lazy("mizzen.cli.about:completion", "Print a script for a shell's completion."),
            "version": Lazy("mizzen.cli.about:version", "Print the version."),
        },
    }


@click.group(cls=_Application, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="mizzen %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Submit machine-learning workloads to mizzen, watch them, and operate its fleet."""
    context.ensure_object(Session)


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code. Errors are printed to stderr."""
    if COMPLETE_VARIABLE in os.environ:
        cli.main(list(arguments), prog_name="mizzen", complete_var=COMPLETE_VARIABLE)
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
        return code
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code if error.exit_code != 1 else Exit.USAGE
    except ClientError as error:
        complain(error)
        return exit_of(error)
    except BrokenPipeError:
        # Nothing may be written to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.PIPE
    except Exception:
        import traceback

        traceback.print_exc()
        return Exit.FAULT


def _invoke(arguments: Sequence[str]) -> int:
    # Not `cli.main`: it has exit codes of its own, such as 1 for a broken pipe.
    try:
        with cli.make_context("mizzen", list(arguments)) as context:
            cli.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return Exit.OK
