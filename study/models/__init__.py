"""Models by name, and the one set of initial weights that every arm loads."""
