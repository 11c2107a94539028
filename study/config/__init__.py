"""Configuration of a run: flags, strategies and their files, launch environment, and errors. Free of torch."""
