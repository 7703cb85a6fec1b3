"""Compares a static fleet sized for peak demand with a smaller fleet plus pools, on real traces."""
