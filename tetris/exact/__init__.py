"""The exact method: the best plan of a small instance and the proof that it is, or a bound of what any plan costs.

A branch and bound proves; where it does not end in time, a relaxation that CP-SAT solves may give a better bound.
"""

from tetris.exact.answer import ExactAnswer, ExactProgress
from tetris.exact.solve import solve

__all__ = ["ExactAnswer", "ExactProgress", "solve"]
