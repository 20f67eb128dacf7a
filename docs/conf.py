"""How Sphinx makes the site; docs/build.py runs it."""

import os
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # importing the package for its docstrings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grain_shard
from docs.build import public_names

logger = logging.getLogger(__name__)

# Every public name as it is written in the pages, and in full, with what describes it.
PUBLIC = {}
for full, described in public_names().items():
    PUBLIC.setdefault(full.rpartition(".")[2], described)
    PUBLIC[full] = described

project = "grain_shard"
author = "the authors of grain_shard"
release = grain_shard.__version__
html_title = f"grain_shard {release}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["site.css"]

# Nothing is loaded from anywhere else.
nb_ipywidgets_js = {}

nb_execution_mode = "off"  # notebooks/run.py runs them; the site shows the outputs that they have
nb_merge_streams = True
myst_heading_anchors = 4
suppress_warnings = [
    "myst.header",  # a notebook may begin with a badge
    "config.cache",
    "mystnb.unknown_mime_type",
]

default_role = "py:obj"  # `shard_to` in a docstring is a link, where there is such a name
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it in words
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

SECTIONS_OF_DOCSTRINGS = {"Args:", "Attributes:", "Example:", "Raises:", "Returns:", "Yields:"}
SHORT = 20  # characters of code that are not broken over two lines


def example_first(app, what, name, obj, options, lines):
    """Puts the example before what is taken, returned and raised, wherever the docstring has it."""
    heads = [i for i, line in enumerate(lines) if line in SECTIONS_OF_DOCSTRINGS]
    for start in heads:
        if lines[start] == "Example:":
            end = next((i for i in heads if i > start), len(lines))
            example, between = lines[start:end], lines[heads[0] : start]
            lines[heads[0] : end] = [*example, "", *between]


def docstring_as_rst(app, what, name, obj, options, lines):
    """Lets a letter follow a backtick, as in "`jax.Array`s", which Sphinx does not.

    Words before a colon, in the first line of a property or of what is returned, Sphinx has taken
    for a type by now. No docstring names one in that way, so that is a mistake.
    """
    for line in lines:
        if re.match(r":r?type:", line):
            logger.warning("taken for the type of %s, by a colon: %s", name, line)
    lines[:] = [re.sub(r"(?<!`)(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]


def keep_short_code_in_one_line(app, doctree):
    """Tells the style sheet what is short."""
    for node in doctree.findall(nodes.literal):
        if len(node.astext()) <= SHORT:
            node["classes"].append("short")


def end_code_with_its_last_line(app, doctree):
    """Takes away the empty line that a doctest in a page needs before its closing fence."""
    for node in doctree.findall(nodes.literal_block):
        text = node.astext()
        if node.rawsource == text:  # it is no output of a notebook, in colors
            node.rawsource = text.rstrip()
            node.children = [nodes.Text(node.rawsource)]


def link_public_names(app, doctree):
    """Makes a link of every `shard_to` and `grain_shard.feeds` in a page: to the reference."""
    for node in list(doctree.findall(nodes.literal)):
        name = node.astext()
        if name in PUBLIC and not isinstance(
            node.parent, nodes.reference | nodes.title | addnodes.pending_xref
        ):
            xref = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=PUBLIC[name], refwarn=False
            )
            node.replace_self(xref)
            xref += node


def setup(app):
    app.connect("autodoc-process-docstring", example_first, priority=400)  # before Sphinx reads it
    app.connect("autodoc-process-docstring", docstring_as_rst)
    app.connect("doctree-read", keep_short_code_in_one_line)
    app.connect("doctree-read", end_code_with_its_last_line)
    app.connect("doctree-read", link_public_names)
