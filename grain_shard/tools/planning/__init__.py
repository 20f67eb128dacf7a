"""Plans: the rows that a job will read, on hosts that need not be there."""
