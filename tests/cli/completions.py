"""Completions of the command line, as a shell asks for them."""

from click.shell_completion import get_completion_class

from mizzen_client.cli.app import cli


def completions(arguments: list[str], incomplete: str) -> list[str]:
    kind = get_completion_class("bash")
    assert kind is not None
    return [item.value for item in kind(cli, {}, "mizzen", "_MIZZEN_COMPLETE").get_completions(arguments, incomplete)]
