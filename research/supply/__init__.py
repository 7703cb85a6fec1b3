"""Machines that pools launch and end during a run, on clouds that replay traces, by the rules of the live system."""
