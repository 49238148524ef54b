"""From what torch knows, its guards, stacks and errors, to what the user needs: a line of their own, and what to do."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence

import torch
from torch import fx


class TraceError(RuntimeError):
    """The model cannot be traced as one graph; the message names the user's line and the remedy."""


class RecompileError(RuntimeError):
    """What the graphs were made for no longer holds. Nothing was traced or captured.

    Attributes:
        guard: The guard that failed, as Dynamo writes it; without a trace, the attribute that has changed.
    """

    def __init__(self, guard: str) -> None:
        super().__init__(
            f"these inputs or the model's state need another trace or capture, and the graphs belong to the first.\n"
            f"Guard that failed: {guard}\n"
            f"Restore the state, make it a tensor input, or build and capture anew."
        )
        self.guard = guard


# private: torch logs why a guard failed, but has no public function that returns it, nor the guards themselves.


def guarded_names(function: Callable) -> frozenset[str] | None:
    """Every name that occurs in the guards of a compiled function; ``None`` if torch does not tell."""
    try:
        return frozenset(re.findall(r"\w+", str(_guards(function))))
    except Exception:
        return None


@torch.no_grad()
def failed_guard(function: Callable, args: Sequence) -> str:
    """The guard that these arguments, or the state of now, fail, as Dynamo writes it."""
    try:
        plain = getattr(function, "__func__", function)
        bound = inspect.signature(plain).bind(*([function.__self__] if plain is not function else []), *args)
        bound.apply_defaults()
        frame_locals = {**inspect.getclosurevars(plain).nonlocals, **bound.arguments}
        return "; ".join(str(part) for part in _guards(function).check_verbose(frame_locals).verbose_code_parts)
    except Exception as error:  # an explanation must never hide the error that it explains
        return f"unknown ({type(error).__name__}); run with TORCH_LOGS=recompiles"


def _guards(function: Callable):
    return torch._dynamo.eval_frame._debug_get_cache_entry_list(getattr(function, "__func__", function).__code__)[0].guard_manager


def source_line(node: fx.Node) -> str:
    """The user's line that a node comes from (of a placeholder: that first reads it), as ``file:line (code)``."""
    frames = _frames(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(os.path.dirname(torch.__file__))]
    return "{}:{} ({})".format(*(own or frames)[-1]) if frames else "a line that torch does not name"


def _frames(stack: str) -> list[tuple[str, str, str]]:
    return re.findall(r'File "(.+)", line (\d+), in .*\n\s*(.+)', stack)


def explained(error: Exception) -> Exception:
    """What torch says of a model that it cannot trace, as a ``TraceError`` with the user's line; the user's own exceptions as they are."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch.fx")):
        return error  # the user's own exception
    text = str(error).split("User stack:")
    frames = _frames(text[-1])
    if stack := getattr(error, "real_stack", None):  # private: most of Dynamo's errors carry the user's stack here
        frames = [(frame.filename, frame.lineno, frame.line) for frame in stack]
    where = "{}:{} ({})".format(*frames[-1]) if frames else "a line that torch does not name"
    reason = " ".join(text[0].split("\n\n")[0].split())
    remedy = "Move that line out of the traced function, hide it in an operator (register_custom_op)"
    if "specialized" in reason:  # Dynamo's word for a dynamic size that the code fixes to a number
        remedy = "Write that line in terms of its inputs' shapes, or make the dimension static (dynamic_dims)"
    return TraceError(
        f"the model cannot be traced as one graph: {reason}\n  at {where}\n"
        f"{remedy}, or capture without a compiler: strategy='breakable'."
    )
