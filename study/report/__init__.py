"""Questions, figures and pages of a report."""
