"""Generated instances of Tetris, and its first version (MAST 5.6), for comparison."""
