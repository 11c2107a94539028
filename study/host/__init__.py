"""This machine: its memory, devices, libraries and compiled operators."""
