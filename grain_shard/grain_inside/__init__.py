"""All that looks at what Grain keeps private, each hint with a public path beside it.

Nothing outside this folder reads an attribute of Grain's that begins with an underscore; a test
holds the package to that.
"""
