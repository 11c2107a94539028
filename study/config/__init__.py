"""What a run is asked for: flags, strategies and their files, the launch, and errors. Free of torch."""
