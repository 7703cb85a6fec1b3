"""The exact method: the best plan of a small instance and the proof that it is, or a bound of what any plan costs.

A branch and bound proves; where it does not end in time, a relaxation that CP-SAT solves may give a better bound.

How large: on 4 regions, with two to three jobs a table, on one core, 75 of 75 generated instances of 14 tables were
proved (all but one within 3 s, the worst in 39 s), 5 of 5 of 20 tables within 6 s, and 4 of 4 of 24 within half a
minute. Of 28 and more some are proved within a minute and some are not. What limits it: while little is decided each
term's bound by itself allows shares that fit perfectly, and what pulls a table to two places at once shows only when
its jobs are decided. Where nothing pulls (weights of zero, sizes that do not matter) many plans cost the same.
"""

from tetris.exact.answer import ExactAnswer, ExactProgress, TooLarge
from tetris.exact.solve import solve

__all__ = ["ExactAnswer", "ExactProgress", "TooLarge", "solve"]
