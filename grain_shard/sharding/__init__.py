"""Which rows go where: layouts, specs, shardings, and the arrays made of them."""
