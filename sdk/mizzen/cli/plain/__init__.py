"""Commands that need only the standard library: `mizzen cadence` and `mizzen checkpoint`.

They run from the wheel without extras, for example in the container image of a training. A command is a
`spec.Command`; `running` parses its arguments with argparse and runs it. If the extra `client` is installed,
`mizzen.cli.passing` adds the same commands to the click application.
"""
