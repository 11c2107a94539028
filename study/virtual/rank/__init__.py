"""One rank of N in this process: its group, its data, and whether this box holds it."""
