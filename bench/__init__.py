"""Benches: what the schedulers, the award and the whole stack reach, each as a ratio of two things of one run.

`harness` times and counts, `command` chooses and prints, and every other module is one suite or draws instances for
several. `docs/bench.md` says how to read the figures.
"""
