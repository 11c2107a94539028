"""From records to pages: notebooks run, page, README's tables, the command."""
