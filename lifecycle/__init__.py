"""The rules of a life: which phase follows which event, and how an ending is judged. Pure tables and functions.

Workflows, the simulator and tests interpret them. Imports value types only.
"""
