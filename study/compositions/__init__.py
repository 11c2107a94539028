"""Combinations of features: trained for a few steps on real engines, and compared with one process of plain PyTorch."""
