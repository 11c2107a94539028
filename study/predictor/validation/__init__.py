"""Predictions held against every record and every published figure, beside other tools."""
