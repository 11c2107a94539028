"""The files of a run: their schema, reading and writing them, and tables of many runs."""
