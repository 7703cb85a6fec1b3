"""submitit's `core`, of which scripts use the errors."""

from mizzen_client.submitit.core import utils

__all__ = ["utils"]
