"""Benchmarks of the schedulers, the award and the whole stack. Each figure is a ratio of two measurements of one run.

`harness` measures, and `command` selects suites and prints results. Each other module is a suite, or code that several
suites share. `docs/bench.md` explains the figures.
"""
