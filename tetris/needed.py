"""What jobs need of tables, in pieces: whole tables, and the partitions that some jobs read of theirs (MAST 3.5).

Beside the columns of an instance, which know tables only. Two jobs that read different days of a table each need their
own, so a part of its bytes alone would not say who is served by a replica of it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from domain.ids import split_read
from domain.reads import Reads
from tetris.columns import Columns, Floats, Ints, Longs


@dataclass(frozen=True, slots=True)
class Needed:
    """E edges of `Columns.job_table`, T tables, P partitions that are read without the rest of their table."""

    partition_names: tuple[str, ...]
    """[P] `table/partition`, by the table's number and then by name."""
    partition_table: Ints
    """[P] table."""
    size_bytes: Floats
    """[T + P] of each piece: tables, and behind them partitions."""
    start: Longs
    """[E + 1] where an edge's pieces begin in `piece`."""
    piece: Ints
    """A table's own number, or partitions of it."""
    part: Floats
    """[E] of the table's bytes."""

    @classmethod
    def of(cls, columns: Columns, reads: Reads | None = None) -> "Needed":
        """What jobs read, which is all of their tables but for what `reads` says.

        Raises:
            ValueError: `reads` names a job that there is not, a table that the job does not read, or a partition whose
                size it does not say.
        """
        edges = len(columns.job_table)
        if reads is None or not reads.by_job:
            nothing = np.zeros(0, np.int32)
            whole = np.arange(edges + 1, dtype=np.int64)
            return cls((), nothing, columns.size_bytes, whole, columns.job_table, np.ones(edges))
        read_at = _edges(columns, reads)
        keys = sorted({(int(columns.job_table[edge]), name) for edge, names in read_at.items() for name in names})
        number = {name: len(columns.size_bytes) + index for index, (_, name) in enumerate(keys)}
        sizes = np.concatenate((columns.size_bytes, [reads.size_bytes[name] for _, name in keys]))
        lengths = np.ones(edges, np.int64)
        lengths[list(read_at)] = [len(names) for names in read_at.values()]
        start = np.concatenate(([0], np.cumsum(lengths)))
        piece = np.repeat(columns.job_table, lengths)
        for edge, names in read_at.items():
            piece[start[edge] : start[edge + 1]] = [number[name] for name in names]
        part = np.ones(edges)
        for edge in read_at:
            of_table = columns.size_bytes[columns.job_table[edge]]
            own = sizes[piece[start[edge] : start[edge + 1]]].sum()
            part[edge] = min(1.0, own / of_table) if of_table else 1.0
        return cls(tuple(name for _, name in keys), np.array([t for t, _ in keys], np.int32), sizes, start, piece, part)

    def pieces(self, edge: int) -> Ints:
        """The pieces of an edge."""
        return self.piece[self.start[edge] : self.start[edge + 1]]

    def names(self, edge: int) -> tuple[str, ...]:
        """The partitions of an edge, as `table/partition`; empty: the whole table."""
        tables = len(self.size_bytes) - len(self.partition_names)
        return tuple(self.partition_names[piece - tables] for piece in self.pieces(edge) if piece >= tables)

    def expand(self, whole: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """[T + P, R] which pieces are where whole tables [T, R] are."""
        return np.concatenate((whole, whole[self.partition_table])) if self.partition_names else whole


def _edges(columns: Columns, reads: Reads) -> dict[int, tuple[str, ...]]:
    """The edges that are partly read, in order, with the names of their partitions, sorted."""
    jobs = {name: index for index, name in enumerate(columns.job_names)}
    found: dict[int, list[str]] = {}
    for job, names in reads.by_job.items():
        if job not in jobs:
            raise ValueError(f"reads: {job!r} is no job of the instance; export both anew")
        begin, end = columns.job_start[jobs[job]], columns.job_start[jobs[job] + 1]
        own = {columns.table_names[columns.job_table[edge]]: edge for edge in range(begin, end)}
        for name in names:
            edge = own.get(split_read(name)[0])
            if edge is None:
                raise ValueError(f"reads of {job}: {name!r} is of no table that the job has in the instance")
            if name not in reads.size_bytes:
                raise ValueError(f"partitions: {name!r} is missing, which {job} reads; give its size in bytes")
            found.setdefault(edge, []).append(name)
    return {edge: tuple(sorted(set(found[edge]))) for edge in sorted(found)}
