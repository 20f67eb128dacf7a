"""The only code that uses private parts of Grain.

If a private part is missing, Grain's public functions give the same batches, but slower. No file
outside this folder reads an attribute of Grain that begins with an underscore. A test checks that.
"""
