"""Tools around a pipeline: plans, profiles, pictures, rehearsals and the commands.

Nothing outside this folder imports them, but for the package's face when one is asked for.
"""
