"""What a host reads: sources, records, rows, and how to tell one pipeline from another."""
