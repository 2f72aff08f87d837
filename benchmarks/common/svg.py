"""How the pictures of benchmarks begin: size, font, title."""

from collections.abc import Iterator
from html import escape

from benchmarks.codecs.plot import FONT_SIZE, GREY

__all__ = ["opening"]


def opening(size: tuple[int, int], alt: str, title: str, subtitle: str) -> Iterator[str]:
    """The first lines of an SVG.

    Args:
        size: width and height, in pixels.
        alt: what the picture shows, for those who do not see it.
        title: the heading in the picture.
        subtitle: the line below it.
    """
    width, height = size
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title"'
    )
    yield (
        "     font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, "
        f'sans-serif" font-size="{FONT_SIZE}">'
    )
    yield f'  <title id="title">{escape(alt)}</title>'
    yield f'  <g fill="{GREY}">'
    yield f'    <text x="16" y="26" font-size="19" font-weight="bold">{escape(title)}</text>'
    yield f'    <text x="16" y="48">{escape(subtitle)}</text>'
    yield "  </g>"
