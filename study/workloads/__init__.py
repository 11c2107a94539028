"""Models, initial weights, tasks and their data."""
