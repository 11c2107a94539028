"""Records become tables here. Nothing below this package needs torch or a GPU."""
