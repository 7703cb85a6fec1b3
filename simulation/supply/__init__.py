"""Machines that come and go: pools that launch on clouds that follow traces, by the rules of the live system."""
