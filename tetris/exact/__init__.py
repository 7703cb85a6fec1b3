"""The exact method: the best plan of a small instance and the proof that it is, or a bound of what any plan costs.

A branch and bound over the tables' homes. The terms' constants and the limits are those of the climb
(`tetris.problem`); what is stated here are lower bounds of the terms while some homes are open.

Why not CP-SAT: of 20 generated instances of 10 to 32 tables on 4 regions, with 20 s each, this proved 15 (all of up
to 20 tables); a relaxation by CP-SAT (tangents of the squares, chords of the overload) proved 1, and its bound was 25
% below the total at the median. With costs read from a grid of 200 steps CP-SAT ended on all 16 of up to 24 tables,
within 18 s, but that proves the best of the grid with each key's demand held fixed, not of the objective. Of 32
tables neither proved any; there the relaxation's bound was the better one: 14 to 51 % below the total, here 36 to 93
%.

How large: on 4 regions, with two to three jobs a table, on one core, 75 of 75 generated instances of 14 tables were
proved (all but one within 3 s, the worst in 39 s), 5 of 5 of 20 tables within 6 s, and 4 of 4 of 24 within half a
minute. Of 28 and more some are proved within a minute and some are not. What limits it: while little is decided each
term's bound by itself allows shares that fit perfectly, and what pulls a table to two places at once shows only when
its jobs are decided. Where nothing pulls (weights of zero, sizes that do not matter) many plans cost the same.
"""

from tetris.exact.answer import ExactAnswer, ExactProgress, TooLarge
from tetris.exact.solve import solve

__all__ = ["ExactAnswer", "ExactProgress", "TooLarge", "solve"]
