"""The page of the autopsy from its records alone."""
