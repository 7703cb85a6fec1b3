"""The exact method for small instances: finds the optimal plan with a proof, or a plan and a lower bound.

It is a branch and bound over the tables' homes. The constants of the terms and the limits are those of the climb
(`tetris.problem`). This package adds lower bounds of the terms for partial plans.

Comparison with CP-SAT: of 20 generated instances of 10 to 32 tables on 4 regions, with 20 s each, the branch and bound
proved 15 (all with up to 20 tables). A CP-SAT relaxation (tangents of the squares, chords of the overload) proved 1,
and its median bound was 25 % below the total. With costs on a grid of 200 steps, CP-SAT solved all 16 instances of up
to 24 tables within 18 s, but that proves the optimum of the grid model with each key's total demand fixed, not of the
objective. For 32 tables neither method proved an instance; the bounds of the relaxation were better there: 14 to 51 %
below the total, against 36 to 93 % here.

Size limits: on 4 regions, with two to three jobs per table, on one core, it proved 75 of 75 generated instances of 14
tables (all but one within 3 s, the slowest in 39 s), 5 of 5 of 20 tables within 6 s, and 4 of 4 of 24 tables within
half a minute. Of instances with 28 or more tables, some are proved within a minute and some are not. The bounds are
weak while few homes are decided: the bound of each term on its own allows perfectly balanced shares, and conflicting
preferences for a table's home become visible only when its jobs are decided. Many plans have equal cost if weights are
zero or sizes do not matter.
"""

from tetris.exact.branch import ExactAnswer, ExactProgress, TooLarge, solve

__all__ = ["ExactAnswer", "ExactProgress", "TooLarge", "solve"]
