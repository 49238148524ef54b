"""Pictures and texts from live structures; importing this draws nothing and needs no drawing library."""

from pcg_ref.show.boundary import boundary_text, draw_boundaries
from pcg_ref.show.dot import Drawing
from pcg_ref.show.split import draw_split, print_split, split_text

__all__ = ["Drawing", "boundary_text", "draw_boundaries", "draw_split", "print_split", "split_text"]
