"""The statistics of an iterator: counts while it runs, and figures computed from the counts."""
