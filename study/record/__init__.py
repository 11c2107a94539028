"""What a run leaves behind, how it is written, and what of it a reader believes. Free of torch."""
