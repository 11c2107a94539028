"""Tests that start no ranks, no sweep and no installation: what code of `study/` and `tools/` computes and refuses."""
