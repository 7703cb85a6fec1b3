"""The `mizzen` command, and its commands that need only the standard library: `cadence` and `checkpoint`.

They run where only this distribution is installed, for example in the container image of a training. Each is a
function that returns its argparse parser (`parser.Parser`); `runner` parses the arguments and runs the command. If
`mizzen-client` is installed, `main` starts `mizzen_client.cli`, which has all other commands.
"""
