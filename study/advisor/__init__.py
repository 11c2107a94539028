"""`study predict`, `study advise`, `study explain` and `study doctor`."""
