"""The server's version."""

VERSION = "0.1.0"
BUILD_ID = f"mizzen-{VERSION}"
"""What workers tell Temporal they are. By default the SDK hashes all loaded modules for it: 1.4 s of CPU a process."""
