"""Simulates machines that their owners take back: ReclaimNet's protocols and the systems it is compared with.

The decisions are those of `reclaim/`, on a virtual clock. `scenario` describes machines, when they are lent, jobs and
links; `documents` reads it from a file, and `drawn` draws what the file leaves open. `engine` simulates one system.
"""
