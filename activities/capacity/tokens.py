"""Join tokens: what an instance is launched with, to show at its first hello that it is what was launched."""

import hashlib
import hmac
from pathlib import Path

from infra.keys import load_master_key


def join_token(master_key: Path, instance: str) -> str:
    """The join token of an instance, derived from the installation's master key and stored nowhere.

    A launch that is repeated after a crash therefore gives the machine the same token.

    Raises:
        ConfigurationError: there is no master key here.
    """
    return hmac.new(load_master_key(master_key), f"join token {instance}".encode(), hashlib.sha256).hexdigest()
