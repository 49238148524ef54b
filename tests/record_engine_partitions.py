"""Record how SGLang's and vLLM's own ``split_graph`` cut a family of graphs, for ``test_splitting.py`` to compare ours with.

    pip download --no-deps sglang==0.5.23 vllm==0.33.0
    python tests/record_engine_partitions.py sglang-0.5.23-*.whl vllm-0.33.0-*.whl

Neither needs to be installed: only the functions of the splitters are executed, out of the source files in the wheels. Nothing of
them enters this repository but what they answered.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import operator
import random
import sys
import typing
import zipfile
from collections import defaultdict
from pathlib import Path

import torch
import torch.fx.passes.split_module
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

RECORDING = Path(__file__).with_name("engine_partitions.json")
SEEDS = range(400)
WIDTH = 4


def _fill(x, output):
    output.copy_(x.cumsum(0) * 0.25 + 1)


# The split operators of the graphs: one that returns its result, one that writes it, one with two results.
_library = torch.library.Library("pcg_graphs", "FRAGMENT")
_library.define("mix(Tensor x) -> Tensor")
_library.define("fill(Tensor x, Tensor(a!) output) -> ()")
_library.define("pair(Tensor x) -> (Tensor, Tensor)")
_library.impl("mix", lambda x: x.cumsum(0) * 0.5, "CompositeExplicitAutograd")
_library.impl("fill", _fill, "CompositeExplicitAutograd")
_library.impl("pair", lambda x: (x + 1, x.cumsum(0) * 0.5), "CompositeExplicitAutograd")
torch.library.register_fake("pcg_graphs::mix", torch.empty_like, lib=_library)
torch.library.register_fake("pcg_graphs::fill", lambda x, output: None, lib=_library)
torch.library.register_fake("pcg_graphs::pair", lambda x: (torch.empty_like(x), torch.empty_like(x)), lib=_library)
OPS = [torch.ops.pcg_graphs.mix, torch.ops.pcg_graphs.fill, torch.ops.pcg_graphs.pair]


class RandomGraph:
    """One random program on ``[T, WIDTH]`` tensors as an FX graph: ``module(T, x, y)``, with a buffer ``state``.

    Values alias (views) and are written in place; split operators come first, last and in a row, as overloads and as packets. Each
    node has ``meta["id"]``, which splitting keeps while it renames nodes; what only serves a ``torch.Size`` has none, since vLLM
    and we replace it.

    Args:
        rng: ``random.Random``, or anything with its methods ``choice`` and ``randrange``.
        shapes: Give every node ``meta["example_value"]``, with a symbolic ``T``.
        steps: What to draw from: names of methods, several in one string to call them one after the other.
    """

    def __init__(self, rng, shapes: bool = True, steps: tuple[str, ...] = ()) -> None:
        self.rng, self.graph = rng, fx.Graph()
        self.tensor = _fake_rows() if shapes else lambda: None
        tokens = None if self.tensor() is None else self.tensor().shape[0]
        self.node("placeholder", "tokens", value=tokens)  # as Dynamo does: every symbol is an input
        self.values = [self.node("placeholder", name) for name in ("x", "y")]  # tensors that may be read and written
        self.unwritten: list[fx.Node] = []  # allocations that only fill may touch
        self.sizes: list[fx.Node] = []
        for _ in range(rng.randrange(2, 14)):
            for step in rng.choice(steps or ALL_STEPS).split():
                getattr(self, step)()
        self.graph.output((self.values[-1], rng.choice(self.values)))
        root = nn.Module()
        root.register_buffer("state", torch.linspace(-1, 1, WIDTH))
        self.module = fx.GraphModule(root, self.graph)
        self.module.register_buffer("state", root.state)  # also where no node reads it

    def node(self, op: str, target, *args, value="tensor", has_id: bool = True) -> fx.Node:
        node = self.graph.create_node(op, target, args)
        if has_id:
            node.meta["id"] = len(self.graph.nodes)
        value = self.tensor() if value == "tensor" else value
        if value is not None:
            node.meta["example_value"] = value
        return node

    def any(self) -> fx.Node:
        return self.rng.choice(self.values)

    def binary(self):
        self.values.append(self.node("call_function", operator.add, self.any(), self.any()))

    def unary(self):
        self.values.append(self.node("call_function", torch.sin, self.any()))

    def view(self):
        self.values.append(self.node("call_method", "view", self.any(), -1, WIDTH))

    def in_place(self):
        self.values.append(self.node("call_method", "add_", self.any(), 0.5))

    def in_place_of_another(self):
        self.node("call_function", torch.ops.aten.mul_.Tensor, self.any(), self.any())  # its result is used by nobody

    def read_state(self):
        self.values.append(self.node("call_function", operator.add, self.any(), self.node("get_attr", "state")))

    def write_state(self):
        self.node("call_method", "add_", self.node("get_attr", "state"), 0.25)

    def rows(self):  # an index that is no tuple's
        self.values.append(self.node("call_function", operator.getitem, self.any(), (slice(None), slice(0, WIDTH))))

    def two_results(self):
        stacked = self.node("call_function", torch.stack, [self.any(), self.any()])
        parts = self.node(
            "call_function", torch.unbind, stacked, value=(self.tensor(), self.tensor()) if self.tensor() is not None else None
        )
        for i in range(2):
            self.values.append(self.node("call_function", operator.getitem, parts, i))

    def one_size(self):
        of = self.any()
        value = None if self.tensor() is None else of.meta["example_value"].shape[0]
        self.sizes.append(self.node("call_method", "size", of, 0, value=value))

    def all_sizes(self):
        if self.tensor() is not None:  # a whole torch.Size may cross a cut only where shapes are known
            of = self.any()
            size = self.node("call_method", "size", of, value=of.meta["example_value"].shape, has_id=False)
            rows = self.node(
                "call_function",
                operator.getitem,
                size,
                self.rng.choice([0, -2]),
                value=of.meta["example_value"].shape[0],
                has_id=False,
            )
            self.sizes += [size, rows]

    def use_size(self):
        if self.sizes:
            size = self.rng.choice(self.sizes)
            whole = size.args[1:] == ()
            self.values.append(self.node("call_method", "reshape", self.any(), *((size,) if whole else (size, WIDTH))))

    def allocate(self):
        self.unwritten.append(self.node("call_function", torch.empty_like, self.any()))

    def split_op(self, name: str) -> object:
        packet = getattr(torch.ops.pcg_graphs, name)
        return self.rng.choice([packet, packet.default])

    def mix(self):
        self.values.append(self.node("call_function", self.split_op("mix"), self.any()))

    def fill(self):
        output = self.unwritten.pop() if self.unwritten else self.any()
        self.node("call_function", self.split_op("fill"), self.any(), output, value=None)
        if output not in self.values:
            self.values.append(output)

    def pair(self):
        call = self.split_op("pair")
        value = (self.tensor(), self.tensor()) if self.tensor() is not None else None
        both = self.node("call_function", call, self.any(), value=value)
        for i in self.rng.choice([(0, 1), (1, 0), (1,)]):
            self.values.append(self.node("call_function", operator.getitem, both, i))


PLAIN_STEPS = ("binary", "unary", "view", "in_place", "in_place_of_another", "read_state", "write_state", "two_results", "one_size")
PLAIN_STEPS += ("use_size", "allocate")
ALL_STEPS = (*PLAIN_STEPS, "rows", "all_sizes", "mix", "mix", "fill", "fill", "pair")
# Without neighbouring split operators, tuples of split operators and lone allocations, on which the engines differ by design.
CALM_STEPS = (*PLAIN_STEPS, "mix binary", "mix in_place", "mix view", "fill unary", "fill binary", "fill write_state unary")


def _fake_rows():
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    first = mode.from_tensor(torch.empty(7, WIDTH), symbolic_context=context)
    return lambda: first


def recorded_graph(seed: int) -> fx.GraphModule:
    """The graph of this seed; every second one is calm, so that there are enough long graphs on which the engines agree."""
    return RandomGraph(random.Random(seed), steps=CALM_STEPS if seed % 2 else ALL_STEPS).module


def partition(items) -> list[list[int]]:
    """The ids of the nodes of each piece, piece by piece."""
    pieces = [[n.meta["id"] for n in item.graph.graph.nodes if n.op.startswith("call_") and "id" in n.meta] for item in items]
    return [sorted(ids) for ids in pieces if ids]


# What follows runs only in the recorder.


def _load(wheel: str, path: str, names: list[str], scope: dict) -> None:
    """Execute the named functions and classes of a source file, and nothing else of it."""
    body = [node for node in ast.parse(zipfile.ZipFile(wheel).read(path)).body if getattr(node, "name", None) in names]
    assert len(body) == len(names), f"{path} lacks some of {names}"
    # Annotations stay text: they name what is not loaded.
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    exec(compile(ast.fix_missing_locations(ast.Module([future, *body], [])), path, "exec"), scope)


def _splitters(sglang: str, vllm: str) -> tuple:
    shared = {"torch": torch, "fx": fx, "dataclass": dataclasses.dataclass, "dataclasses": dataclasses, "Any": typing.Any}
    first = {"__name__": __name__, **shared}
    second = {"__name__": __name__, **shared, "operator": operator, "defaultdict": defaultdict}
    second["_use_lazy_graph_module"] = lambda _: contextlib.nullcontext()
    second["is_torch_equal_or_newer"] = lambda _: False  # whether pieces return tuples; the partition is the same
    _load(sglang, "sglang/srt/compilation/backend.py", ["SplitItem", "split_graph"], first)
    _load(vllm, "vllm/compilation/partition_rules.py", ["should_split"], second)
    helpers = ["_is_empty_allocation_node", "_merge_empty_only_subgraphs", "_decompose_size_nodes"]
    _load(vllm, "vllm/compilation/backends.py", ["SplitItem", "split_graph", *helpers], second)
    return first["split_graph"], second["split_graph"]


def record(sglang: str, vllm: str) -> dict:
    split_sglang, split_vllm = _splitters(sglang, vllm)
    # Each engine compares printed names, and prints them in its own way.
    sglang_names = [name for op in OPS for name in (str(op), str(op.default))]
    vllm_names = [op._qualified_op_name for op in OPS]
    partitions, disagreed = {}, []
    for seed in SEEDS:
        a = partition(split_sglang(recorded_graph(seed), sglang_names)[1])
        b = partition(split_vllm(recorded_graph(seed), vllm_names)[1])
        if a == b:
            partitions[seed] = a
        else:
            disagreed.append(seed)
    versions = dict(Path(wheel).name.split("-")[:2] for wheel in (sglang, vllm)) | {"torch": torch.__version__}
    return {"versions": versions, "disagreed": disagreed, "partitions": partitions}


if __name__ == "__main__":
    recording = record(*sys.argv[1:])
    rows = ",\n".join(f'  "{seed}": {json.dumps(pieces)}' for seed, pieces in recording["partitions"].items())
    head = ",\n".join(f' "{key}": {json.dumps(recording[key])}' for key in ("versions", "disagreed"))
    RECORDING.write_text(f'{{\n{head},\n "partitions": {{\n{rows}\n }}\n}}\n')
    print(f"{len(recording['partitions'])} graphs recorded, {len(recording['disagreed'])} on which the engines disagree")
