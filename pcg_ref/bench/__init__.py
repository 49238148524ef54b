"""``python -m pcg_ref bench``: every strategy, and what a user would pick instead, in one interleaved run.

``systems`` sets up what is compared, ``measure`` compares and times, ``record`` keeps and shows the result. Nothing here is needed to
use the package.
"""
