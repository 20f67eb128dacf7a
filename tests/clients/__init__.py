"""Other people's trainers, fed by their own input and by ours: ``python -m tests.clients --help``.

Each file is a client. Its head (PEP 723) names the Python and the packages that it needs; the lines
between ``# recipe`` and ``# end of recipe`` are the recipe that docs/recipes.md shows or links.
"""
