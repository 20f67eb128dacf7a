"""Eight virtual CPU devices, for the tests and for the examples in docstrings."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
