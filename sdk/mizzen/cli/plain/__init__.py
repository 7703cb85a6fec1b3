"""Commands that need the standard library only: `mizzen cadence` and `mizzen checkpoint`.

They run from the plain wheel, such as in the image of a training. A command is a `spec.Command`; `running` parses the
arguments with argparse and runs it. Where the extra `client` is installed too, `mizzen.cli.passing` lists the same
commands in the click application.
"""
