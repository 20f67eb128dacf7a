"""Plans the rows that each host of a job will read, without the hosts."""
