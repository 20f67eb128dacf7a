"""Tools around a pipeline: plans, profiles, pictures, rehearsals and the commands.

No other module of the package imports this folder. A public name of a tool is imported when it is
first used.
"""

import importlib
import random

# The import of this module draws from `random`, whose state is the user's.
_state = random.getstate()
importlib.import_module("rich.style")
random.setstate(_state)
