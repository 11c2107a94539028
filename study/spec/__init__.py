"""What a run is: its flags and defaults, and the strategy files."""
