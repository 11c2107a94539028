"""Tests that start ranks, a sweep or an installation: real engines, processes and packages."""
