"""Clusters of tables, which walks move together."""

import numpy as np
import pytest

from tests.tetris.small import small_instance
from tetris.columns import Columns
from tetris.kernels.search import cluster, home_nearby
from tetris.problem import PlacementProblem


def _component(columns: Columns, table: int) -> set[int]:
    """Returns the tables that jobs connect to a table, directly or by a chain, among tables of the same home."""
    found, new = {table}, [table]
    while new:
        one = new.pop()
        for job in range(len(columns.kind)):
            tables = columns.job_table[columns.job_start[job] : columns.job_start[job + 1]].tolist()
            if one in tables:
                joined = {t for t in tables if columns.home[t] == columns.home[one]} - found
                found |= joined
                new += joined
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_cluster_is_what_jobs_join_within_a_home(seed: int) -> None:
    """A cluster is the whole connected set of tables of one home, or a connected part of the maximum size."""
    columns = Columns.of(small_instance(seed, 30, 3, 40))
    problem = PlacementProblem(columns)
    members, marks = np.zeros(64, np.int32), np.zeros(31, np.int32)
    for table in range(30):
        whole = _component(columns, table)
        for most in (2, 5, 64):
            count, _ = cluster(problem.fixed, problem.state, table, most, members, marks)
            found = members[:count].tolist()
            assert found[0] == table and len(set(found)) == count == min(most, len(whole))
            assert set(found) <= whole
            for index, member in enumerate(found[1:], 1):
                assert any(member in _neighbours(columns, other) for other in found[:index])


def _neighbours(columns: Columns, table: int) -> set[int]:
    jobs = (columns.job_table[a:b].tolist() for a, b in zip(columns.job_start[:-1], columns.job_start[1:], strict=True))
    return {other for tables in jobs if table in tables for other in tables}


def test_a_home_nearby_is_one_of_a_neighbour() -> None:
    """A nearby home is a home of a table that the same job reads; for a table without jobs, its own home."""
    columns = Columns.of(small_instance(3, 20, 4, 20))
    problem = PlacementProblem(columns)
    for table in range(20):
        homes = {int(columns.home[t]) for t in _neighbours(columns, table) or {table}}
        assert {home_nearby(problem.fixed, problem.state, table) for _ in range(20)} <= homes
