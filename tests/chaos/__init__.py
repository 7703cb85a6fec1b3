"""Chaos: a whole stack under faults and hostile users, judged from outside (`python -m tests.chaos --help`).

The tasks write what happens to them into journals of their own, outside of the stack's folders, stamped with the clock
of the machine's boot (`task`). The judge reads the journals and the answers that users got, and no row or file of
mizzen's own (`judge`). Faults and requests are drawn from a seed (`schedule`), so the seed of a violation repeats them.
"""
