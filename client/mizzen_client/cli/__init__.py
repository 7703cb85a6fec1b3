"""The commands of `mizzen` that talk to the API, to a machine's agent, or come from other distributions.

`mizzen.cli.main` calls `start`. Most modules here define the commands about one kind of object. `app` lists all
commands and imports a command's module when the command runs. Other distributions add commands through the entry-point
group `mizzen.commands`; each entry is a `click.Command`.
"""
