"""The figures of a report. Each function takes Records and gives drawings; none where there is nothing to draw."""
