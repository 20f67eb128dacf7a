"""The colors of all pictures: in notebooks, documents, plans, timelines and what `show` shows.

They are Okabe and Ito's, which people with any kind of color vision can tell apart.
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

# Lines and frames of things that are counted, such as hosts and devices. Yellow comes late, because
# a yellow line on white can hardly be seen.
COLORS = BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, GRAY

# The same in the same order, mixed half and half with white: areas, on which black text is read.
FILLS = "#80B9D9", "#F3CF80", "#80CFB9", "#E6BCD3", "#ABDAF4", "#EBAF80", "#F8F2A1", "#CCCCCC"

EMPTY = "#EEEEEE"  # where nothing is, or what is only there to compare with
PADDING = "#BBBBBB"  # rows that are no records
