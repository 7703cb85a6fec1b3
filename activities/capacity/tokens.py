"""Join tokens: an instance is launched with its token, and its first hello presents the token to be admitted."""

import hashlib
import hmac
from pathlib import Path

from infra.keys import load_master_key


def join_token(master_key: Path, instance: str) -> str:
    """Returns the join token of an instance. It is derived from the installation's master key and is not stored.

    So a launch that is repeated after a crash gives the machine the same token.

    Raises:
        ConfigurationError: this machine has no master key.
    """
    return hmac.new(load_master_key(master_key), f"join token {instance}".encode(), hashlib.sha256).hexdigest()
