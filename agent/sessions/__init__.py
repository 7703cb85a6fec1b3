"""Sessions in running tasks: a command with its terminal or pipes, and connections to ports."""
