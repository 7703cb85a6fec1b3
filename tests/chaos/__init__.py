"""Chaos tests: a whole stack under injected faults and random requests, checked from outside (docs/chaos.md).

Tasks write their own journals outside of the stack's folders, stamped with the machine's boot clock (`task`). The judge
reads the journals and the responses that users got, but no row or file of mizzen (`judge`). Faults and requests are
drawn from a seed (`schedule`), so a violation can be repeated with its seed.
"""
