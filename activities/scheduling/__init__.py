"""Activities of the scheduler: scans, bids, auctions, awards and dry runs, on the columnar state of a process."""
