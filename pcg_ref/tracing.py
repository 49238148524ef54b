"""From a model to one FX graph with a dynamic token dimension.

``torch.compile(fullgraph=True)`` runs Dynamo over the model's Python once and hands the whole FX graph to a backend. Ours keeps the
graph and returns a callable that runs it, so that what stands behind the guards can be exchanged later (for the split module).

Tracing runs nothing: the call that makes Dynamo trace is ended before the traced program starts, so no buffer changes. This module
does not cut, compile or capture anything.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from pcg_ref.explain import RecompileError, TraceError, explained, failed_guard, guarded_names


class _Traced(Exception):
    """Raised by our backend to end the tracing call before the traced program runs."""


class Trace:
    """One FX graph of a model, and the guarded callable that runs it.

    Calling it equals calling the model, through Dynamo's guards: a call that fails them is a second trace, counted in
    ``compile_count``, until ``freeze()`` makes it an error.

    Attributes:
        model: What was traced.
        graph_module: The FX graph. Its placeholders are the flat inputs: the model's arguments, parameters and buffers, and one
            ``SymInt`` for the token dimension.
        example_inputs: The flat inputs at tracing time, in the order of the placeholders.
        input_names: What each flat input is to the user: an argument's, parameter's or buffer's name.
        compile_count: Calls of the backend, 1 after tracing.
    """

    def __init__(self, model: Callable) -> None:
        self.model = model
        self.graph_module: fx.GraphModule | None = None
        self.example_inputs: list = []
        self.input_names: list[str] = []
        self.compile_count = 0
        self._frozen = False
        self._body: Callable | None = None
        self._function, self._forward = with_own_code(model), _forward_of(model)
        # subtle: Dynamo keeps backends for the life of the process, and what they return as long as the code object. Both get a weak
        # reference, or no traced model would ever be freed.
        self._weak = weakref.ref(self)
        weak = self._weak
        self._compiled = torch.compile(self._function, fullgraph=True, backend=lambda *args: weak()._backend(*args))

    def _backend(self, graph_module: fx.GraphModule, example_inputs: list) -> Callable:
        self.compile_count += 1
        if self.compile_count > 1:
            return graph_module.forward  # a retrace, for inputs that the first graph's guards refuse
        self.graph_module, self.example_inputs = graph_module, list(example_inputs)
        self.input_names = [self._input_name(n, value) for n, value in zip(graph_module.graph.find_nodes(op="placeholder"), example_inputs)]

        weak = self._weak

        def run(*flat_inputs):
            self = weak()
            if self._body is None:
                raise _Traced
            if not self._frozen:
                return self._body(*flat_inputs)
            with torch.compiler.set_stance("default"):  # what is frozen is this trace; a piece may compile itself further
                return self._body(*flat_inputs)

        return run

    def _input_name(self, node: fx.Node, value: object) -> str:
        module = module_of(self.model)
        if isinstance(module, nn.Module) and isinstance(value, torch.Tensor):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor is value:
                    return name
        return node.name.removeprefix("l_").removesuffix("_")

    def mark_owners(self, example_args: tuple) -> None:
        """Note on each placeholder whose memory it is, for those who see only the graph; what is neither an argument nor a parameter is
        the model's, whether it is registered as a buffer or not."""
        arguments = {id(leaf) for leaf in tree_leaves(example_args)}
        for node, value in zip(self.graph_module.graph.find_nodes(op="placeholder"), self.example_inputs):
            if isinstance(value, torch.Tensor):
                own = "parameter" if isinstance(value, nn.Parameter) else "buffer"
                node.meta["owner"] = "static input" if id(value) in arguments else own

    def __call__(self, *args):
        """The traced graph on new arguments. Raises ``RecompileError`` when frozen and a guard fails."""
        return self.call(self.graph_module.forward, *args)

    def call(self, body: Callable, *args):
        """Call through the guards, but run ``body(*flat_inputs) -> tuple`` in place of the traced graph.

        Raises:
            RecompileError: The trace is frozen and a guard failed; nothing ran.
        """
        if self._frozen and _forward_of(self.model) != self._forward:  # no guard looks at the function itself
            raise RecompileError("the model's forward is the function that was traced")
        earlier, self._body = self._body, body
        try:
            with torch.inference_mode(False), torch.no_grad(), no_autocast_cache():  # as traced: all are among the guards
                if not self._frozen:
                    return self._compiled(*args)
                with torch.compiler.set_stance("fail_on_recompile"):
                    return self._compiled(*args)
        except RuntimeError as error:
            if not (self._frozen and "Detected recompile" in str(error)):
                raise
            with no_autocast_cache():
                guard = failed_guard(self._function, args)
            raise RecompileError(guard) from None
        finally:
            self._body = earlier

    def freeze(self) -> None:
        """From now on a failed guard is a ``RecompileError`` and no second trace."""
        self._frozen = True

    def check_guards(self, *args) -> None:
        """Raises ``RecompileError`` if the trace is frozen and these arguments, or the state of now, fail its guards. Runs nothing."""

        def stop(*flat_inputs):
            raise _Traced

        with contextlib.suppress(_Traced):
            self.call(stop, *args)

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor was an input when the model was traced."""
        return any(value is tensor for value in self.example_inputs)

    def guarded_names(self) -> frozenset[str] | None:
        """Every name of an attribute that a guard reads, and others; ``None`` if torch does not tell."""
        return guarded_names(self._function)


def trace(model: Callable, *example_args, dynamic_dims: Mapping[str | int, int | Sequence[int]] | None = None) -> Trace:
    """Trace a model whole, once, with dynamic dimensions.

    Mirrors SGLang's ``install_torch_compiled`` (``compilation/compile.py``), without replacing the model's ``forward``.

    Args:
        model: A module or function of tensors.
        example_args: Its arguments. Only shapes, dtypes and devices matter; nothing is computed with them.
        dynamic_dims: For each argument, by name or index, the dimension or dimensions that will vary. By default dimension 0 of
            every tensor argument.

    Returns:
        A ``Trace`` with ``compile_count == 1``.

    Raises:
        ValueError: A dynamic dimension has size 0 or 1 in the example (torch specialises those), or names no argument.
        TraceError: Part of the model cannot be traced.

    Side effects: marks the dynamic dimensions on ``example_args`` themselves (``torch._dynamo.mark_dynamic``).
    """
    result = Trace(model)
    # subtle: marked on the very tensors that are passed; a slice of a marked tensor is not marked.
    for tensor, dim in _dynamic_tensors(model, example_args, dynamic_dims):
        torch._dynamo.mark_dynamic(tensor, dim)
    try:
        # subtle: Dynamo remembers, by line of code, what differed between traces. Without the patch the second model of a class gets
        # its number attributes as inputs and an .item() in its graph, which no capture survives.
        with torch.no_grad(), no_autocast_cache(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            result._compiled(*example_args)
    except _Traced:
        result.mark_owners(example_args)
        return result
    except Exception as error:
        raise explained(error) from error
    raise TraceError("the model launches nothing that can be traced: its FX graph is empty")


def _argument_names(model: Callable, args: Sequence) -> list[str]:
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except ValueError:  # a builtin function has none
        return [f"argument {i}" for i in range(len(args))]
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    try:
        signature.bind(*args)
    except TypeError as error:
        raise TypeError(
            f"{type(model).__name__} takes {signature}, and was given {len(args)} arguments ({error}). A runner calls its model as "
            f"model(tokens[T], positions[T]); wrap a transformers model in pcg_ref.models.packed_causal_lm.PackedCausalLM"
        ) from None
    named = [name for name in signature.bind(*args).arguments if kinds[name] is not inspect.Parameter.VAR_POSITIONAL]
    return named + [f"argument {i}" for i in range(len(named), len(args))]  # those that *args takes have no name


def _dynamic_tensors(model: Callable, args: Sequence, dynamic_dims: Mapping | None) -> list[tuple[torch.Tensor, int]]:
    if dynamic_dims is None:
        dynamic_dims = {i: 0 for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.dim()}
    names = _argument_names(model, args)
    marked = []
    for key, dims in dynamic_dims.items():
        index = names.index(key) if key in names else key
        if not isinstance(index, int) or not 0 <= index < len(args) or not isinstance(args[index], torch.Tensor):
            raise ValueError(f"dynamic_dims names {key!r}, which is no tensor argument; the arguments are {names}")
        for dim in [dims] if isinstance(dims, int) else dims:
            shape = list(args[index].shape)
            if not -len(shape) <= dim < len(shape):
                raise ValueError(f"dynamic_dims gives dimension {dim} for argument {names[index]!r}, whose shape is {shape}")
            size = shape[dim]
            if size < 2:
                raise ValueError(
                    f"argument {names[index]!r} has size {size} in its dynamic dimension {dim}; torch specialises sizes 0 and 1, so "
                    f"trace with at least 2"
                )
            marked.append((args[index], dim % len(shape)))  # mark_dynamic takes a negative dimension and ignores it
    return marked


@contextlib.contextmanager
def no_autocast_cache():
    """Casts of weights inside the graphs, and not their cached results: weights may change, and the cache ends with the autocast block."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def module_of(model: Callable) -> Callable:
    """The module behind a model that is a method of one, or a ``functools.partial`` of either; else the model itself."""
    while isinstance(model, functools.partial):
        model = model.func
    return getattr(model, "__self__", model)


def _forward_of(model: Callable) -> Callable | None:
    return model.forward if isinstance(model, nn.Module) else None


def with_own_code(model: Callable) -> Callable:
    """The function to trace, as a copy with a code object of its own.

    # subtle: Dynamo caches compiled programs on the code object, which all instances of a class share. With a copy, a second trace of
    # the same class neither reuses nor evicts the first, and counts against no recompile limit but its own.
    """
    if isinstance(model, nn.Module) and not (model._forward_hooks or model._forward_pre_hooks):
        model = model.forward
    if inspect.ismethod(model):
        return types.MethodType(with_own_code(model.__func__), model.__self__)
    if not inspect.isfunction(model):
        return with_own_code(lambda *args: model(*args))
    copy = types.FunctionType(model.__code__.replace(), model.__globals__, model.__name__, model.__defaults__, model.__closure__)
    copy.__kwdefaults__ = model.__kwdefaults__
    return copy
