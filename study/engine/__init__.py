"""Set-up, introspection and audit of DeepSpeed, FSDP and model-parallel groups."""
