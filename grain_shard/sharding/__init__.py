"""Finds the rows that each host holds, from meshes and specs, and makes global arrays."""
