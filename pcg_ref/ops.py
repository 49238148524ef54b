"""How an operator becomes opaque to the compiler, and how it becomes a boundary.

Two independent steps, in the order in which the decorators are read from below:

1. ``register_custom_op`` gives a Python function a dispatcher operator ``pcg_ref::<name>``. The compiler then sees one node and
   never looks inside, so the body may read run-time metadata that no trace could hold.
2. ``register_split_op`` puts that operator into the registry at which ``split_graph`` cuts.

This module does not trace or cut anything.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence

import torch

NAMESPACE = "pcg_ref"

_libraries: dict[str, torch.library.Library] = {}  # operator name -> the library that keeps its definition alive
_bodies: dict[torch._ops.OpOverload, Callable] = {}  # operator -> the Python function behind it
_split_ops: dict[torch._ops.OpOverload, None] = {}  # a dict used as an ordered set


def register_custom_op(
    mutates_args: Iterable[str] = (), *, fake: Callable | None = None, tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable], torch._ops.OpOverload]:
    """Turn a Python function into the operator ``pcg_ref::<function name>``.

    The operator is a thin ``torch.library.Library`` definition and not a ``torch.library.custom_op``: the same body costs several
    times less host time per call that way, and an attention operator is called once per layer. Mirrors SGLang's
    ``register_custom_op`` and vLLM's ``direct_register_custom_op``.

    Args:
        mutates_args: Names of the tensor arguments that the body writes to. Everything the compiler may reorder depends on it.
        fake: Shape function with the signature of the body, called with fake tensors during tracing. An operator that returns
            nothing needs none; one that returns tensors must have one.
        tags: Tags of the definition. ``torch.Tag.cudagraph_unsafe`` makes torch.compile's own partitioners cut here too.

    Returns:
        A decorator; it returns the ``OpOverload``, and calling that calls the operator.

    Raises:
        ValueError: A parameter has no type annotation, ``mutates_args`` names no parameter, an operator that returns tensors has no
            ``fake``, or another function already took the name.

    Side effects: defines an operator in this process. Running the same definition again (a notebook cell) replaces it.
    """
    mutates_args = [mutates_args] if isinstance(mutates_args, str) else list(mutates_args)

    def decorate(fn: Callable) -> torch._ops.OpOverload:
        schema = _infer_schema(fn, mutates_args)
        returns_tensors = not schema.endswith("-> ()")
        if returns_tensors and fake is None:
            raise ValueError(
                f"operator {fn.__name__!r} returns {schema.split('->')[-1].strip()}, so tracing needs its shapes: pass "
                f"fake=<function with the same parameters that returns empty tensors of the right shape>"
            )
        _forget_earlier_definition(fn)
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(fn.__name__ + schema, tags=tuple(tags))
        library.impl(fn.__name__, fn, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{fn.__name__}", fake or (lambda *args, **kwargs: None), lib=library)
        overload = getattr(getattr(torch.ops, NAMESPACE), fn.__name__).default
        _libraries[fn.__name__] = library
        _bodies[overload] = fn
        return overload

    return decorate


def _infer_schema(fn: Callable, mutates_args: list[str]) -> str:
    hints = typing.get_type_hints(fn)
    parameters = inspect.signature(fn).parameters
    for name in parameters:
        if name not in hints:
            raise ValueError(
                f"parameter {name!r} of {fn.__name__!r} has no type annotation; the operator's schema is read from the annotations, "
                f"so write for example '{name}: torch.Tensor' or '{name}: int'"
            )
    unknown = [name for name in mutates_args if name not in parameters]
    if unknown:
        raise ValueError(f"mutates_args names {unknown}, but {fn.__name__!r} has the parameters {list(parameters)}")
    returns = hints.get("return")
    # infer_schema reads the signature: give it one of types, also under "from __future__ import annotations".
    probe = lambda: None  # noqa: E731
    probe.__signature__ = inspect.Signature(
        [p.replace(annotation=hints[name]) for name, p in parameters.items()],
        return_annotation=None if returns is type(None) else returns,
    )
    return torch.library.infer_schema(probe, mutates_args=mutates_args)


def _forget_earlier_definition(fn: Callable) -> None:
    name = fn.__name__
    if name not in _libraries:
        return
    overload = next(op for op in _bodies if op._schema.name == f"{NAMESPACE}::{name}")
    earlier = _bodies[overload]
    if (earlier.__module__, earlier.__qualname__) != (fn.__module__, fn.__qualname__):
        raise ValueError(
            f"operator {NAMESPACE}::{name} is already defined by {earlier.__module__}.{earlier.__qualname__}; "
            f"give {fn.__module__}.{fn.__qualname__} another name"
        )
    del _bodies[overload]
    _split_ops.pop(overload, None)
    _libraries.pop(name)._destroy()  # private: Library has no public way to undo a definition


def register_split_op() -> Callable[[torch._ops.OpOverload], torch._ops.OpOverload]:
    """Mark an operator as a boundary: ``split_graph`` gives each call of it a piece of its own.

    Outermost of the decorators; also usable as a call on any operator, ``register_split_op()(torch.ops.ns.op)``. Mirrors SGLang's
    ``register_split_op``.

    Returns:
        A decorator that returns its argument.

    Raises:
        TypeError: The argument is not an operator, most often a plain function that lacks ``@register_custom_op`` below.
    """

    def decorate(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
        if isinstance(op, torch._ops.OpOverloadPacket):
            for overload in op.overloads():
                _split_ops[getattr(op, overload)] = None
        elif isinstance(op, torch._ops.OpOverload):
            _split_ops[op] = None
        else:
            raise TypeError(
                f"register_split_op() needs an operator, got {op!r}: put @register_custom_op(mutates_args=[...]) directly below it"
            )
        return op

    return decorate


def split_ops() -> tuple[torch._ops.OpOverload, ...]:
    """Every registered split operator, in the order of registration."""
    return tuple(_split_ops)


def python_body(op: object) -> Callable | None:
    """The Python function behind an operator made by ``register_custom_op``, or ``None`` for any other operator."""
    return _bodies.get(op) if isinstance(op, torch._ops.OpOverload) else None
