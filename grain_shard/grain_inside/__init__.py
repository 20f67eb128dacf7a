"""All access to Grain's private parts; each hint has a public path that gives the same batches.

No file outside this folder reads an attribute of Grain that begins with an underscore; a test
checks that.
"""
