"""The form of the addresses at which machines can be reached, and the network by which clients are counted."""

import ipaddress
import re

HOST_RULE = "an IP address or a host name"
_IPV6_PREFIX = 64
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
"""As in `proxies.balance.values`: the balancer would refuse the whole list of a service with another host."""


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
    """Returns whether the number is a valid TCP port to connect to (1 to 65,535)."""
    return 0 < number < 1 << 16


def network_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Returns an IPv4 address, or the /64 network of an IPv6 address, within which a client can choose its address.

    An IPv4 address that is mapped into IPv6 counts as the IPv4 address.
    """
    if address.version == 6 and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False))
