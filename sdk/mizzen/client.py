"""The public names of `mizzen_client`, the API's client: `from mizzen.client import Client`.

They are in a distribution of its own: `pip install mizzen-client`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mizzen_client import *  # noqa: F403

try:
    import mizzen_client as _client
except ModuleNotFoundError as error:
    if error.name != "mizzen_client":
        raise
    needs = "mizzen.client and mizzen.Executor need the distribution mizzen-client: pip install mizzen-client"
    raise ModuleNotFoundError(needs, name="mizzen_client") from None

__all__ = _client.__all__


def __getattr__(name: str) -> Any:
    return getattr(_client, name)


def __dir__() -> list[str]:
    return __all__
