"""Tools around a pipeline: plans, profiles, pictures, rehearsals and the commands.

No other module of the package imports this folder. A public name of a tool is imported when it is
first used.
"""
