"""Run directories as tables: what a row is, which rows are one experiment, and what repeats allow to say."""
