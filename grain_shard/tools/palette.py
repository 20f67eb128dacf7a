"""The colors of all pictures: in notebooks, documents, plans, timelines and the output of `show`.

They are the colors of Okabe and Ito, which people with any kind of color vision can tell apart.
"""

from __future__ import annotations

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
SKY = "#56B4E9"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
YELLOW = "#F0E442"
GRAY = "#999999"

# Colors for lines and frames, in the order of hosts or devices. Yellow is near the end, because a
# yellow line on white can hardly be seen.
COLORS = BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, GRAY

# The same colors in the same order, mixed half and half with white, for areas behind black text.
FILLS = "#80B9D9", "#F3CF80", "#80CFB9", "#E6BCD3", "#ABDAF4", "#EBAF80", "#F8F2A1", "#CCCCCC"

EMPTY = "#EEEEEE"  # empty areas, and things that are only shown for comparison
PADDING = "#BBBBBB"  # rows of padding
