"""Parses the addresses on which programs listen, as given in options."""

from infra.errors import ConfigurationError


def parse_address(text: str, *, default_host: str = "0.0.0.0") -> tuple[str, int]:
    """Returns host and port of `HOST:PORT`; without HOST, `default_host`. An IPv6 address is in brackets.

    Raises:
        ConfigurationError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65_536 or (":" in host and not host.startswith("[")):
        raise ConfigurationError(f"{text!r} is not an address to listen on: must be HOST:PORT, such as 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]") or default_host, int(port)
