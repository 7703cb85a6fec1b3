"""Entry point of `python -m bench`."""

from bench.command import bench

bench()
