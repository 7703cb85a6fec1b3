"""The data that jobs need, in *pieces*: whole tables, or single partitions if a job reads only these (MAST 3.5).

The columns of an instance (`tetris.columns`) describe whole tables only. Two jobs may read different partitions of a
table, so the fraction of bytes in a replica does not determine which jobs the replica serves.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from domain.ids import split_read
from domain.instance import Reads
from tetris.columns import Columns, Floats, Ints, Longs


@dataclass(frozen=True, slots=True)
class RequiredPieces:
    """The pieces of E edges of `Columns.job_table`.

    There are T tables, and P partitions that a job reads without reading the whole table.
    """

    partition_names: tuple[str, ...]
    """[P] names as `table/partition`, sorted by table number, then by name."""
    partition_table: Ints
    """[P] table number of each partition."""
    size_bytes: Floats
    """[T + P] size of each piece: first the tables, then the partitions."""
    start: Longs
    """[E + 1] offset of each edge's pieces in `piece`."""
    piece: Ints
    """The pieces of all edges: a table number, or T plus a partition number."""
    part: Floats
    """[E] fraction of the table's bytes that the job reads."""

    @classmethod
    def of(cls, columns: Columns, reads: Reads | None = None) -> "RequiredPieces":
        """Builds the pieces. A job reads its whole tables, except for the partitions given in `reads`.

        Raises:
            ValueError: `reads` names an unknown job, a table that the job does not read, or a partition without a size.
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
        """Returns the pieces of an edge."""
        return self.piece[self.start[edge] : self.start[edge + 1]]

    def names(self, edge: int) -> tuple[str, ...]:
        """Returns the partitions of an edge as `table/partition`; empty if the job reads the whole table."""
        tables = len(self.size_bytes) - len(self.partition_names)
        return tuple(self.partition_names[piece - tables] for piece in self.pieces(edge) if piece >= tables)

    def expand(self, whole: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Expands a mask of whole tables in regions [T, R] to a mask of pieces in regions [T + P, R]."""
        return np.concatenate((whole, whole[self.partition_table])) if self.partition_names else whole


def _edges(columns: Columns, reads: Reads) -> dict[int, tuple[str, ...]]:
    """Returns the edges of partially read tables, in order, with the sorted names of the partitions."""
    jobs = {name: index for index, name in enumerate(columns.job_names)}
    found: dict[int, list[str]] = {}
    for job, names in reads.by_job.items():
        if job not in jobs:
            raise ValueError(f"reads: {job!r} is not a job of the instance; export both again")
        begin, end = columns.job_start[jobs[job]], columns.job_start[jobs[job] + 1]
        own = {columns.table_names[columns.job_table[edge]]: edge for edge in range(begin, end)}
        for name in names:
            edge = own.get(split_read(name)[0])
            if edge is None:
                raise ValueError(f"reads of {job}: {name!r} is not a partition of a table of that job in the instance")
            if name not in reads.size_bytes:
                raise ValueError(f"partitions: {name!r} is missing, but {job} reads it; give its size in bytes")
            found.setdefault(edge, []).append(name)
    return {edge: tuple(sorted(set(found[edge]))) for edge in sorted(found)}
