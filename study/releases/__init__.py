"""Which releases of DeepSpeed compute what DDP computes: stacks, verdicts, causes."""
