"""Memory, communication and host time of a training step on the installed engines."""
