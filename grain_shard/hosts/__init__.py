"""The communication between hosts while they run, and the files of a checkpoint."""
