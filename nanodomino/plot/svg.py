"""What every picture is drawn with: a frame, text, boxes, lines, ticks, a legend, as the text of an SVG.

A picture is a list of such elements in pixels, the later ones painted over the earlier, y downwards:

    body = [text(8, 18, "Loss", "title"), box(92, 30, 200, 26, "#9bd1f4", tip="what a mouse sees")]
    write(Path("loss.svg"), frame(1000, 70, body))

No library is asked for: a browser, a README and a printer all read the elements used here.
"""

import math
import os
from pathlib import Path
from xml.sax.saxutils import escape

from nanodomino.errors import UserError, require

WIDTH = 1000             # pixels of a picture; a README shows some 1000, a browser more
LINE, LETTER = 18, 7     # the height of a line of text, the width of a character
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" \
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
    """The whole picture. definitions: patterns, markers and clips that its elements name."""
    return SVG.format(width=width, height=height, definitions=definitions, body="\n".join(body))


def plain(words) -> str:
    """As SVG may hold it: what a folder's name can hold is not always a character."""
    return escape("".join(one if one.isprintable() else "?" for one in str(words)))


def text(x, y, words, kind="") -> str:
    """kind: classes of the style, such as "small pale"."""
    return f'<text x="{x:.1f}" y="{y:.1f}"' + (f' class="{kind}"' if kind else "") + f">{plain(words)}</text>"


def box(x, y, width, height, fill, tip="", stroke="", opacity=1.0) -> str:
    look = (f' stroke="{stroke}" stroke-width="0.7"' if stroke and width > 2 else "")
    look += f' opacity="{opacity}"' if opacity < 1 else ""
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}" fill="{fill}"{look}'
            + (f"><title>{plain(tip)}</title></rect>" if tip else "/>"))


def line(path, stroke, look="") -> str:
    """path: SVG's own words for one, such as "M0 0L6 3"; look: further attributes."""
    return f'<path d="{path}" stroke="{stroke}"{look and " " + look}/>'


def tick_step(scale, apart) -> float:
    """The smallest 1, 2 or 5 times a power of ten that spans `apart` pixels, at `scale` pixels a unit."""
    power = math.floor(math.log10(apart / scale))
    return next(step for exponent in (power, power + 1) for step in (factor * 10.0 ** exponent for factor in (1, 2, 5))
                if step * scale >= apart)


def legend(entries, y) -> tuple[list[str], float]:
    """In as many lines as it takes. entries: (sample(x, y) -> an element of 14 x 12 pixels, name) -> (elements, where
    they end)."""
    parts, x = [], 8
    for sample, name in entries:
        if x + 19 + LETTER * len(name) > WIDTH:
            x, y = 8, y + LINE
        parts += [sample(x, y), text(x + 19, y + 10.5, name)]
        x += 19 + LETTER * len(name) + 12
    return parts, y + LINE


def write(path: Path, picture: str):
    """Whole at any moment, also where it replaces another: written beside, then renamed."""
    if path.exists() and not path.is_file():
        path.write_text(picture, encoding="utf-8")             # /dev/stdout: nothing to replace
        return
    path = path.resolve()
    beside = path.with_name(f".{path.name}-{os.getpid()}")     # two processes may draw the same run
    try:
        beside.write_text(picture, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_output(path: Path, picture: str, inputs: list[Path]):
    """What a command's --output names. Raises UserError."""
    require(path.resolve() not in [one.resolve() for one in inputs],
            f"--output {path} is what the picture is drawn from, and would be lost; choose another file")
    try:
        write(path, picture)
    except OSError as error:
        raise UserError(f"--output {path} can't be written ({error.strerror}); choose another file") from None
