"""How the site is made of what lies elsewhere in the repository; read by mkdocs, see mkdocs.yml.

Files outside of docs/ that documents link to become pages: Markdown as it is, anything else as
code. Links are written as the repository needs them, and are changed to those pages here. Whatever
else they miss is a warning of mkdocs, and so an error; so is a page that would fetch something from
another place when it is read.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

_LOGGER = logging.getLogger("mkdocs.hooks.pages")
ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in ROOT.glob("examples/*.py")},
}
_SOURCES = {page: source for source, page in PAGES.items()}
_EXAMPLE = re.compile(r"^Example:$", re.M)
_FETCH = re.compile(
    r'<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)="(?:https?:)?//[^>]*>|class="mermaid"'
)
_LINK = re.compile(r"\]\(([^()\s#:]+)(#[^()\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_text_of(source)))
    return files


def _text_of(source: str) -> str:
    text = (ROOT / source).read_text()
    if source.endswith(".md"):
        return text
    language = "python" if source.endswith(".py") else "text"
    return f"# {Path(source).name}\n\n```{language}\n{text}```\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lets links point to pages."""
    uri = page.file.src_uri
    here = posixpath.dirname(_SOURCES.get(uri, f"docs/{uri}"))

    def change(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[1]))
        if target not in PAGES and not target.startswith("docs/"):
            return link[0]
        found = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(found, posixpath.dirname(uri) or '.')}{link[2] or ''})"

    return _LINK.sub(change, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> None:
    """Warns of what would be fetched; Material fetches the program that draws Mermaid's figures."""
    for found in _FETCH.findall(output):
        _LOGGER.warning("%s fetches from another place: %s", page.file.src_uri, found)


class Headings(griffe.Extension):
    """Gives the one example of a docstring the heading that griffe knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is found."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)
