"""What the pictures of benchmarks share: colours, font, size, title."""

from collections.abc import Iterator, Sequence
from html import escape

__all__ = ["FAINT", "FONT_SIZE", "GREY", "RIVAL", "TEAL", "label_places", "opening"]

FONT_SIZE = 14
# Middle tones, which are readable on white and on black.
GREY, FAINT, TEAL, RIVAL = "#76808c", "#8b949e", "#14917f", "#a87b22"


def opening(
    size: tuple[int, int], alt: str, title: str, subtitle: str, *, left: int = 16
) -> Iterator[str]:
    """The first lines of an SVG.

    Args:
        size: width and height, in pixels.
        alt: what the picture shows, for those who do not see it.
        title: the heading in the picture.
        subtitle: the line below it.
        left: where both lines begin, in pixels.
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
    yield f'    <text x="{left}" y="26" font-size="19" font-weight="bold">{escape(title)}</text>'
    yield f'    <text x="{left}" y="48">{escape(subtitle)}</text>'
    yield "  </g>"


def label_places(wanted: Sequence[float], bottom: float, line_height: float) -> list[float]:
    """Heights of labels near the wanted ones, at least a line apart, none below the axis.

    Args:
        wanted: heights, in pixels from the top.
        bottom: the height of the axis.
        line_height: the least distance between two.
    """
    places = list(wanted)
    order = sorted(range(len(wanted)), key=lambda k: -wanted[k])
    below = bottom + line_height
    for k in order:
        places[k] = below = min(wanted[k], below - line_height)
    return places
