"""The same run through other people's loops: what study/train.py's own loop costs, or saves, against them."""
