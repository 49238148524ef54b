"""How Python asks, in the middle of a capture, to run outside the graph.

Someone who captures puts a handler in place; a marked function that finds one is handed to it and not called. Without a handler, a
marked function is the plain function. The handler is the ``breakable`` strategy's; nothing here captures.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable

# handler(function, args, kwargs) -> what the function would return
break_handler: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("pcg_ref_break_handler", default=None)


def eager_on_graph(function: Callable) -> Callable:
    """Mark a Python function as an eager break.

    While a ``breakable`` capture runs, a call ends the graph segment before it, runs the function for real, records it as an eager
    segment with these very arguments, and starts the next graph segment. Anywhere else it is the plain function. Must be the outermost
    decorator: what lies outside it is captured. A split operator needs no marking.

    Mirrors SGLang's ``eager_on_graph`` and vLLM's ``eager_break_during_capture``.

    Args:
        function: Tensors it returns are copied to buffers that stay (or refused, see the strategy); anything else it returns must not
            change from call to call.
    """

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        handler = break_handler.get()
        return function(*args, **kwargs) if handler is None else handler(function, args, kwargs)

    return wrapper
