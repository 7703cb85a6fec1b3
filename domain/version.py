"""The version of the server."""

VERSION = "0.2.0"
BUILD_ID = f"mizzen-{VERSION}"
"""The build id that workers report to Temporal. The SDK's default, a hash of all loaded modules, takes 1.4 s of CPU per
process."""
