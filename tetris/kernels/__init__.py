"""Compiled inner loops. They have a separate folder, so that other changes in Tetris do not cause recompilation."""
