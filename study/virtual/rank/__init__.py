"""One rank of N in this process: its group, and whether this box holds it."""
