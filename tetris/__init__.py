"""Tetris, the slow path (MAST 3): chooses the home region and the replicas of each table, and the order of the moves.

The package contains the objective and its plain reference implementation, the searches and solvers, the documents of
instances and plans, and generators of instances. It has no database and no network; random numbers come from a given
seed. It imports `domain`, numpy, ortools and the libraries that read its documents.
"""
