"""What hosts tell each other, and leave each other in a checkpoint."""
