"""Simulated schedulers, replays of traces, and the experiments of the papers: nothing that a running role imports."""
