"""Building blocks for SVG pictures: a frame, text, boxes, lines, axis ticks and a legend.

A picture is a list of SVG elements. Coordinates are in pixels, and y points down. Later elements cover earlier ones:

    body = [text(8, 18, "Loss", "title"), box(92, 30, 200, 26, "#9bd1f4", tip="shown under the mouse")]
    write_output(Path("loss.svg"), frame(1000, 70, body))
"""

import math
from pathlib import Path
from xml.sax.saxutils import escape

from nanodomino.errors import UserError, require
from nanodomino.files import check_outside_ours, is_device, open_regular_file, write_file

WIDTH = 1000             # pixels of a picture
LINE, LETTER = 18, 7     # the height of a line of text and the width of a character, in pixels
BEGIN = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 '
SVG = BEGIN + """{width:.0f} {height:.0f}" width="{width:.0f}" \
height="{height:.0f}">
<style>text{{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f1f1f}}
.title{{font-size:15px;font-weight:600}} .halo{{stroke:#fff;stroke-width:2.5px}}
.middle,.halo{{text-anchor:middle}} .end{{text-anchor:end}} .small{{font-size:11px}} .pale{{fill:#666}}</style>
<defs>{definitions}</defs>
<rect width="100%" height="100%" fill="#fff"/>
{body}
</svg>
"""


def frame(width, height, body: list[str], definitions="") -> str:
    """Return the whole SVG. definitions: the patterns, markers and clip paths that the elements in `body` use."""
    return SVG.format(width=width, height=height, definitions=definitions, body="\n".join(body))


def printable(words) -> str:
    """Escape text for XML. Unprintable characters, which a folder's name may contain, become '?'."""
    return escape("".join(character if character.isprintable() else "?" for character in str(words)))


def text(x, y, words, style="") -> str:
    """Return a text element. style: classes of the style sheet above, such as "small pale"."""
    return f'<text x="{x:.1f}" y="{y:.1f}"' + (f' class="{style}"' if style else "") + f">{printable(words)}</text>"


def box(x, y, width, height, fill, tip="", stroke="", opacity=1.0) -> str:
    look = (f' stroke="{stroke}" stroke-width="0.7"' if stroke and width > 2 else "")
    look += f' opacity="{opacity}"' if opacity < 1 else ""
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}" fill="{fill}"{look}'
            + (f"><title>{printable(tip)}</title></rect>" if tip else "/>"))


def line(path, stroke, look="") -> str:
    """Return a path element. path: SVG path data, such as "M0 0L6 3"; look: further attributes."""
    return f'<path d="{path}" stroke="{stroke}"{look and " " + look}/>'


def tick_step(scale, minimum_pixels) -> float:
    """Return the distance between two ticks of an axis, such as 0.5, 1, 2, 5, 10 or 20.

    It is the smallest such number that is at least `minimum_pixels` wide. scale: pixels per unit.
    """
    power = math.floor(math.log10(minimum_pixels / scale))
    return next(step for exponent in (power, power + 1) for step in (factor * 10.0 ** exponent for factor in (1, 2, 5))
                if step * scale >= minimum_pixels)


def legend(entries, y) -> tuple[list[str], float]:
    """Return (elements, the y below them) of a legend that starts at y and takes as many lines as it needs.

    entries: (sample, name) pairs, where sample(x, y) returns an element of 14 x 12 pixels, such as a coloured box.
    """
    elements, x = [], 8
    for sample, name in entries:
        if x + 19 + LETTER * len(name) > WIDTH:
            x, y = 8, y + LINE
        elements += [sample(x, y), text(x + 19, y + 10.5, name)]
        x += 19 + LETTER * len(name) + 12
    return elements, y + LINE


def check_output(path: Path):
    """Raise UserError if a picture at this path would overwrite anything but a picture of ours, or lie in a checkpoint
    or a corpus."""
    check_outside_ours(path)
    if path.is_file() and not is_device(path):
        with open_regular_file(path) as file:
            begin = file.read(len(BEGIN)).decode(errors="replace")
        require(begin in ("", BEGIN), f"{path} is no picture that this program has drawn, so it is not overwritten; "
                "choose another file")


def write_output(path: Path, picture: str):
    """Write the picture to --output and say so. Raises UserError if the file can't be written."""
    try:
        check_output(path)
        write_file(path, picture.encode())
    except OSError as error:
        raise UserError(f"{path} can't be written ({error.strerror}); choose another file") from None
    if not is_device(path):                                    # /dev/stdout receives nothing but the picture
        print(f"drawn in {path}")
