"""Pictures and texts from live structures; importing this draws nothing and needs no drawing library."""

from pcg_ref.show.dot import Drawing
from pcg_ref.show.split import draw_split, print_split, split_text

__all__ = ["Drawing", "draw_split", "print_split", "split_text"]
