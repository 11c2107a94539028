"""The claims of the studied documents as data, with their checks and verdicts."""
