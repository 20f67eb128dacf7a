"""One account of an iterator: counts while it runs, and the figures that follow from them."""
