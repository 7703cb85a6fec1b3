"""The click application: its commands by section, and `run`, which returns an exit code."""

import os
from collections.abc import Sequence

import click

from mizzen import __version__
from mizzen.cli.runner import guarded
from mizzen_client.cli.exits import Exit, exit_of, table
from mizzen_client.cli.lazy import Lazy, LazyGroup
from mizzen_client.cli.session import Session, complain
from mizzen_client.cli.start import COMPLETE_VARIABLE
from mizzen_client.errors import ClientError

_EPILOG = f"""\b
Exit codes:
{table()}

Data goes to stdout and everything else to stderr. `-o json` works with every command. The API's URL and key are taken
from MIZZEN_API and MIZZEN_API_KEY, or from the context that `mizzen login` saved.

A workload is given by its id, the start of its id, or its name. If several have the name, commands that only read take
the newest, and commands that change it ask."""


class _Application(LazyGroup):
    sections = {
        "Workloads": {
            "run": Lazy("run_command:run", "Run a command in the fleet, print its output, and exit with its status."),
            "submit": Lazy("submit:submit", "Submit workload documents."),
            "convert": Lazy("convert_command:convert", "Convert a file of another scheduler into a document."),
            "retry": Lazy("submit:retry", "Submit the documents of workloads again."),
            "wait": Lazy("submit:wait", "Wait until workloads have ended."),
            "ls": Lazy("workload_commands:ls", "List workloads."),
            "top": Lazy("top_command:top", "Show the fleet and your workloads, updated continuously."),
            "show": Lazy("workload_commands:show", "Show one workload with its attempts."),
            "why": Lazy("workload_commands:why", "Explain why a workload is in its current phase or still waits."),
            "logs": Lazy("log_commands:logs", "Print the output of a workload's tasks."),
            "get": Lazy("output_commands:get", "Fetch an output of a workload, or list its outputs."),
            "events": Lazy("log_commands:events", "Print the events of a workload, or all events."),
            "exec": Lazy("session_commands:exec_", "Run a command in a running task, and exit with its status."),
            "port-forward": Lazy("session_commands:port_forward", "Forward local ports to ports of a running task."),
            "cancel": Lazy("workload_commands:cancel", "Cancel workloads."),
            "hold": Lazy("workload_commands:hold", "Keep workloads in the queue until they are released."),
            "release": Lazy("workload_commands:release", "Release held workloads, so that they can be placed again."),
            "lower": Lazy("workload_commands:lower", "Lower a workload's priority."),
            "throttle": Lazy("workload_commands:throttle", "Set how many elements of an array run at a time."),
            "preempt": Lazy(
                "workload_commands:preempt", "Return workloads to the queue after they have saved a checkpoint."
            ),
        },
        "Services": {
            "serve": Lazy("service_commands:serve", "Create, update, show and end services."),
        },
        "Fleet": {
            "queue": Lazy("workload_commands:queue", "Show the waiting workloads in queue order."),
            "regions": Lazy("fleet:regions", "List regions; set their storage limits and CPU quotas."),
            "clusters": Lazy("clusters:clusters", "List clusters; set their zones, capacity kinds, prices and stores."),
            "machines": Lazy("fleet:machines", "List machines; cordon or drain them."),
            "pools": Lazy("pools:pools", "List pools; create, resize and remove them."),
            "instances": Lazy("pools:instances", "List the machines requested from providers; end them."),
            "costs": Lazy("fleet:costs", "Show the costs of workloads."),
            "loops": Lazy("fleet:loops", "Show whether housekeeping and other periodic loops succeed."),
            "export": Lazy("fleet:export", "Write a snapshot of the fleet for the simulator."),
            "tables": Lazy("tables:tables", "List input tables; add, extend, copy and verify them."),
            "tenants": Lazy("tenants:tenants", "List tenants; set their quotas and secrets."),
            "keys": Lazy("tenants:keys", "List, create and revoke API keys."),
            "audit": Lazy("tenants:audit", "Show the audit log: who changed what."),
        },
        "This machine": {
            "reclaim": Lazy("plain_commands:reclaim", "Take this machine back from mizzen, at once or with a notice."),
            "lend": Lazy("plain_commands:lend", "Lend this machine to mizzen again, always or at certain hours."),
            "lending": Lazy("plain_commands:lending", "Show what this machine lends, and what runs on it."),
        },
        "Training code": {
            "cadence": Lazy("plain_commands:cadence", "Explain how often to save a checkpoint."),
            "checkpoint": Lazy("plain_commands:checkpoint", "List, check, export, copy, prune and repair checkpoints."),
        },
        "Setup": {
            "login": Lazy("setup_commands:login", "Check the URL and key of an API, and save them."),
            "console": Lazy("setup_commands:console", "Open the console in a browser, already logged in."),
            "contexts": Lazy("setup_commands:contexts", "List, select and remove saved contexts."),
            "completion": Lazy("setup_commands:completion", "Print the completion script of a shell."),
            "version": Lazy("setup_commands:version", "Print the version of the command."),
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
    return guarded(lambda: _invoke(arguments))


def _invoke(arguments: Sequence[str]) -> int:
    # `cli.main` is not used because its exit codes differ, such as 1 for a broken pipe.
    try:
        with cli.make_context("mizzen", list(arguments)) as context:
            cli.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort:
        return Exit.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code if error.exit_code != 1 else Exit.USAGE
    except ClientError as error:
        complain(error)
        return exit_of(error)
    return Exit.OK
