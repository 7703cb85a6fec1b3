"""Scans, bids, auctions, awards and dry runs, on the columns that a process holds."""
