"""The words between hosts, and the files that they leave each other in a checkpoint."""
