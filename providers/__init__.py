"""Providers of machines, a folder each (`capacity.providers.Provider`). `docs/providers.md` says how to write one."""
