"""A receipt of a training loop outside of this study: its memory and time by part, from two lines in its script."""
