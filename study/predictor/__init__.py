"""Memory, communication and step time of a configuration before it is run, each figure with its error."""
