"""The server's command line: the commands that need more than the SDK, and the demo. May import everything of ours."""
