"""Render the pictures in docs/ to PNG, in light and in dark: ``python docs/render.py FOLDER``.

Needs the extra ``docs``. The renderer has no media queries, so the rules for dark are applied by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import resvg_py

DARK_RULES = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?)\n    \}\n", re.DOTALL)
BACKGROUNDS = {"light": "#ffffff", "dark": "#0d1117"}


def render(picture: Path, folder: Path) -> None:
    """Write ``picture`` into ``folder``, once for each colour scheme."""
    text = picture.read_text()
    variants = {"light": DARK_RULES.sub("", text), "dark": DARK_RULES.sub(r"\1\n", text)}
    for name, variant in variants.items():
        png = resvg_py.svg_to_bytes(svg_string=variant, background=BACKGROUNDS[name], width=1400)
        (folder / f"{picture.stem}-{name}.png").write_bytes(bytes(png))


if __name__ == "__main__":
    for each in sorted(Path(__file__).parent.glob("*.svg")):
        render(each, Path(sys.argv[1]))
