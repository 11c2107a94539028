"""From records to pages: notebooks run, page, the command."""
