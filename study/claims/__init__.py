"""The claims of the studied documents as data, what judges each of them, and the verdicts."""
