"""`study predict`, `study advise`, `study explain`, `study doctor` and `study why`."""
