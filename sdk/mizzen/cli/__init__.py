"""The `mizzen` command. `main` and `plain` need the standard library only; the rest needs the extra `client`.

Each module here is a noun's commands; `app` knows them by name and loads one when it is run. Commands of other
distributions come through the entry-point group `mizzen.commands`: each entry is a `click.Command`.
"""
