"""Tests of what people read: reports, plots, claims, the calculator, the README and docs. They start no ranks."""
