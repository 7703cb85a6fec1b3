"""The server's commands, which need more than the SDK, and the demo. This package may import every other package."""
