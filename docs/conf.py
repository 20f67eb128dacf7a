"""The site: `sphinx-build -W docs build/site`."""

import os
import re
import sys

import sphinx.util.logging
from docutils import nodes
from sphinx import addnodes

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # importing the package for its docstrings

import grain_shard

sys.path.insert(0, os.path.dirname(__file__))  # site_search.py

project = "grain_shard"
author = "the authors of grain_shard"
release = grain_shard.__version__
html_title = f"grain_shard {release}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_search",
]
# benchmarks.md includes the pages of benchmarks/.
exclude_patterns = ["**/.ipynb_checkpoints", "benchmarks/*"]
templates_path = ["templates"]
html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's own underlines names as if they were links
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
if "GITHUB_REPOSITORY" in os.environ:  # GitHub's name of the repository that builds the site
    link = {"name": "GitHub", "html": "Source on GitHub", "class": ""}
    link["url"] = f"https://github.com/{os.environ['GITHUB_REPOSITORY']}"
    html_theme_options["footer_icons"] = [link]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("pictures.js", {"defer": "defer"})]
nb_ipywidgets_js = {}  # nothing is loaded from elsewhere

nb_execution_mode = "off"  # notebooks/run.py runs them; the site shows the outputs that they have
nb_merge_streams = True
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "config.cache", "mystnb.unknown_mime_type"]

default_role = "py:obj"  # `shard_to` in a docstring is a link, where there is such a name
autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

logger = sphinx.util.logging.getLogger(__name__)
PUBLIC = {name: f"grain_shard.{name}" for name in grain_shard.__all__}
SHORT = 20  # characters of code that are not broken over two lines
LONG = 100  # characters beyond which a line of output is wrapped


def link_pages_of_other_folders(app, doctree):
    """Names pages beside docs/, to which its links to folders lead."""
    for node in doctree.findall(addnodes.pending_xref):
        if os.path.isabs(node["reftarget"]):
            page = os.path.relpath(node["reftarget"], app.srcdir.parent)
            node["reftarget"] = "benchmarks" if page.startswith("benchmarks/") else page


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
        if max(map(len, text.splitlines()), default=0) > LONG:
            node["classes"].append("long")


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
    app.connect("autodoc-process-docstring", docstring_as_rst)
    app.connect("doctree-read", link_pages_of_other_folders)
    app.connect("doctree-read", keep_short_code_in_one_line)
    app.connect("doctree-read", end_code_with_its_last_line)
    app.connect("doctree-read", link_public_names)
