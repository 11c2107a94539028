"""Releases of DeepSpeed compared with DDP: stacks, verdicts, causes."""
