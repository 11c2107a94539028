"""The lifecycle of one run around any training loop: checks, record, checkpoints, ending."""
