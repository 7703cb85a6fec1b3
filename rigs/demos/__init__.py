"""Demos of several minutes, which check their results from outside."""
