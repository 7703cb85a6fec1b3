"""Tetris, the slow path (MAST 3): which region is home to each table, where its replicas are, and what moves first.

What belongs here: the objective and its plain reference, the searches and solvers, the documents of instances and
plans, and generators of instances. Only pure functions: no clock, database or network, and chance from a seed that is
given. It imports `domain`, numpy, ortools and what reads its documents.
"""
