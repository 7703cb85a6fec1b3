"""The form of the addresses at which machines can be reached."""

import ipaddress
import re

HOST_RULE = "an IP address or a host name"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
"""As in `balance.values`: the balancer would refuse the whole list of a service with another host."""


def is_ip(text: str) -> bool:
    """Returns whether the text is an IP address, without a zone: any text may follow the `%` of a zone."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def is_host(text: str) -> bool:
    """Returns whether the text is an IP address or has the form of a host name."""
    return is_ip(text) or _HOST.fullmatch(text) is not None


def is_port(number: int) -> bool:
    """Returns whether the number is that of a port to which programs can connect."""
    return 0 < number < 1 << 16
