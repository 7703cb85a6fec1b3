"""The compiled inner loops. A folder of its own, so that what else changes in Tetris compiles nothing anew."""
