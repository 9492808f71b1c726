"""Building blocks for SVG pictures: a frame, text, boxes, lines and axis ticks.

A picture is a list of SVG elements. Coordinates are in pixels, and y points down. Later elements cover earlier ones:

    body = [text(8, 18, "Loss", "title"), box(92, 30, 200, 26, "#9bd1f4")]
    write_file(Path("loss.svg"), frame(1000, 70, body).encode())
"""

import math
from xml.sax.saxutils import escape

WIDTH = 1000             # pixels of a picture
LINE, LETTER = 18, 7     # the height of a line of text and the width of a character, in pixels
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" \
height="{height:.0f}" xml:space="preserve">
<style>text{{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f1f1f}}
.title{{font-size:15px;font-weight:600}} .halo{{stroke:#fff;stroke-width:2.5px}}
.middle,.halo{{text-anchor:middle}} .end{{text-anchor:end}} .small{{font-size:11px}} .pale{{fill:#666}}
.fixed{{font-family:monospace;white-space:pre}}</style>
<defs>{definitions}</defs>
<rect width="100%" height="100%" fill="#fff"/>
{body}
</svg>
"""


def frame(width, height, body: list[str], definitions="") -> str:
    """Return the whole SVG. definitions: the patterns, markers and clip paths that the elements in `body` use."""
    return SVG.format(width=width, height=height, definitions=definitions, body="\n".join(body))


def text(x, y, words, style="") -> str:
    """Return a text element. style: classes of the style sheet above, such as "small pale"."""
    printable = "".join(character if character.isprintable() else "?" for character in str(words))  # a folder's name
    return f'<text x="{x:.1f}" y="{y:.1f}"' + (f' class="{style}"' if style else "") + f">{escape(printable)}</text>"


def box(x, y, width, height, fill, stroke="", opacity=1.0) -> str:
    look = (f' stroke="{stroke}" stroke-width="0.7"' if stroke and width > 2 else "")
    look += f' opacity="{opacity}"' if opacity < 1 else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}" fill="{fill}"{look}/>'


def line(path, stroke, look="") -> str:
    """Return a path element. path: SVG path data, such as "M0 0L6 3"; look: further attributes."""
    return f'<path d="{path}" stroke="{stroke}"{look and " " + look}/>'


def ticks(low, high, scale, apart, least=0.0) -> list[float]:
    """Return the values from low to high at which an axis has ticks.

    Their distance is 1, 2 or 5 times a power of ten: the smallest that is at least `apart` pixels wide and at least
    `least`. scale: pixels per unit
    """
    wanted = max(apart / scale, least)
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
