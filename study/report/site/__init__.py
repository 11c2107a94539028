"""Building a report from records: notebooks run, pages, and a folder that replaces only its own files."""
