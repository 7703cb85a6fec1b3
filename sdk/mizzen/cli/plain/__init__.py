"""Commands that need only the standard library: `mizzen cadence` and `mizzen checkpoint`.

They run from the wheel without extras, for example in the container image of a training. Each command is a function
that returns its argparse parser (`parser.Parser`); `running` parses the arguments and runs the command. If the extra
`client` is installed, `mizzen.cli.plain_commands` adds the same commands to the click application.
"""
