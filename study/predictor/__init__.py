"""What a configuration will hold, send and take before it is run, each figure with its error."""
