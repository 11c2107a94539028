"""What a report answers."""
