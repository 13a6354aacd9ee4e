"""Reference pages: a table of the names comes first, and base classes that no page documents are left out."""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

OBJECT = re.compile(
    r'<h\d id="(?P<path>[\w.]+)" class="doc doc-heading">.*?<span class="doc doc-object-name[^>]*>(?P<name>\w+)</span>'
    r'.*?<div class="doc doc-contents[^>]*>\s*(?:<p class="doc doc-class-bases">.*?</p>)?\s*<p>(?P<sentence>.*?)</p>'
    r'|<h2 id="[\w-]+">(?P<section>.*?)<a class="headerlink"',
    re.DOTALL,
)
BASES = re.compile(r'\s*<p class="doc doc-class-bases">\s*Bases: (.*?)</p>', re.DOTALL)
SHOWN = re.compile(r'<code>(?:<a |<span title="(?!attnflow\.|abc\.|typing\.)).*?</code>')


def rows(html: str) -> list[tuple[str, str, str]]:
    """(path, name, sentence) of what the page documents, without members of classes; sections have no path."""
    found = list(OBJECT.finditer(html))
    paths = {match["path"] for match in found if match["path"]}
    return [
        (match["path"], match["name"], match["sentence"]) if match["path"] else ("", match["section"], "")
        for match in found
        if not match["path"] or match["path"].rpartition(".")[0] not in paths
    ]


def table(html: str) -> str:
    """One line for each name. A section without names has no line."""
    lines: list[str] = []
    heading = ""
    for path, name, sentence in rows(html):
        if not path:
            heading = f'<tr><th colspan="2" scope="rowgroup">{name}</th></tr>'
            continue
        lines += [heading] if heading else []
        lines.append(f'<tr><td><a href="#{path}"><code>{name}</code></a></td><td>{sentence}</td></tr>')
        heading = ""
    return f'<table class="names"><tbody>{"".join(lines)}</tbody></table>'


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the table behind the title and the page's first words."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    return re.sub(r'(?=<h2 |<div class="doc doc-children)', lambda _: table(html), html, count=1)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keep bases that are links and those of other packages: what else a class inherits is no business of readers."""

    def kept(match: re.Match[str]) -> str:
        shown = SHOWN.findall(match[1])
        return f'<p class="doc doc-class-bases">Bases: {", ".join(shown)}</p>' if shown else ""

    return BASES.sub(kept, output)
