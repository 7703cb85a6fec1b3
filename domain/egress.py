"""To which addresses the control plane sends requests that a user's document names.

A document must not make workers send requests into their own network. Therefore only public addresses are used, and
the networks that an operator allows.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
_NAT64 = ip_network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Returns whether an address is one of the public internet, and so is the IPv4 address that it may stand for."""
    inner = _inside(address)
    return address.is_global and not address.is_multicast and (inner is None or is_public(inner))


def refusal(scheme: str, address: str, allowed: Sequence[Network]) -> str | None:
    """Returns why no request is sent to an address with a scheme (`http` or `https`); None: it may be sent.

    `address` may have a zone. `allowed` are networks that are not public, or to which requests without encryption are
    sent.
    """
    found: Address = ip_address(address.partition("%")[0])
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if any(found in network for network in allowed):
        return None
    if not is_public(found):
        return "it is not at a public address"
    return None if scheme == "https" else "it is not https"


def _inside(address: Address) -> IPv4Address | None:
    """Returns the IPv4 address that is embedded in an IPv6 address, to which routers may translate it."""
    if address.version == 4:
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
