"""What a job will read, on hosts that need not be there."""
