"""Tests of Tetris, the slow path of scheduling."""
