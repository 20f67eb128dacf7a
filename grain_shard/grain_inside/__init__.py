"""All access to Grain's private parts. Without it, public paths give the same batches, slower.

No file outside this folder reads an attribute of Grain that begins with an underscore; a test
checks that.
"""
