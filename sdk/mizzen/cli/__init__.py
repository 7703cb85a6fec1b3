"""The `mizzen` command. `main` and `plain` need only the standard library; all other modules need the extra `client`.

Most modules here define the commands about one kind of object. `app` lists all commands and imports a command's module
when the command runs. Other distributions add commands through the entry-point group `mizzen.commands`; each entry is
a `click.Command`.
"""
