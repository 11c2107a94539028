"""`study doctor`: what this box has, what `study run laptop` misses here, and the command that fixes it."""
