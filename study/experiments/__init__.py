"""Experiments on the study's code: nothing outside of this folder imports them."""
