"""Quality ledger: distances of lossy modes from the exact result, next to the rounding floor."""
