"""What the site's search knows: the sections of the pages, and words that readers type for them.

An extension of Sphinx. `static/search.js` ranks what it writes.
"""

import json
import re
from pathlib import Path

from docutils import nodes
from sphinx.errors import ExtensionError

FOUND_BY = Path(__file__).with_name("found_by.txt")


def found_by():
    """The words of `found_by.txt`, by page and heading."""
    sections = re.findall(
        r"^(\S+) > (.+)\n((?:  .+\n)+)", FOUND_BY.read_text("utf-8"), re.MULTILINE
    )
    return {(page, heading): " ".join(text.split()).split("; ") for page, heading, text in sections}


def sections(app):
    """Yields each section of each page, without the sections that it holds."""
    left = found_by()
    for page in sorted(app.env.found_docs):
        title = app.env.titles[page].astext()
        for section in app.env.get_doctree(page).findall(nodes.section):
            own = [child for child in section if not isinstance(child, nodes.section | nodes.title)]
            heading = section.next_node(nodes.title).astext()
            is_page = not isinstance(section.parent, nodes.section)
            yield {
                "page": page,
                "name": title if is_page else f"{title} > {heading}",
                "anchor": "" if is_page else f"#{section['ids'][0]}",
                "text": " ".join(
                    text
                    for child in own
                    for text in child.findall(nodes.Text)
                    if not isinstance(text.parent, nodes.comment)
                ),
                "foundBy": left.pop((page, heading), []),
            }
    if left:
        raise ExtensionError(f"{FOUND_BY.name}: no page has these headings: {sorted(left)}")


def write_sections(app, exception):
    if exception is None and app.builder.format == "html":
        text = json.dumps(list(sections(app)), ensure_ascii=False)
        Path(app.outdir, "_static", "sections.js").write_text(
            f"const SECTIONS = {text};\n", "utf-8"
        )


def rank_sections(app, page, template, context, doctree):
    """The page of the search has the sections and what ranks them."""
    if page == "search":
        for script in ("sections.js", "search.js"):
            app.add_js_file(script, defer="defer")  # after Sphinx's script, and before it searches


def setup(app):
    app.connect("html-page-context", rank_sections)
    app.connect("build-finished", write_sections)
    return {"parallel_read_safe": True}
