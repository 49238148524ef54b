"""Random modules: a grammar whose every sentence is runnable Python.

A program is a list of lines for ``__init__`` and a list of lines for ``forward(tokens[T], positions[T])``. Each line is run as it is
drawn, at ``T = DRAWN_AT``; one that torch refuses is dropped, so that the grammar need not know torch's rules for shapes, and one that
would make a row depend on others is dropped where rows must be independent.

Letters: ``T`` tokens.
"""

from __future__ import annotations

import itertools
import linecache
import re
from contextlib import contextmanager
from dataclasses import dataclass, field

import program_ops
import torch
from program_ops import MODULUS, READS_METADATA
from program_steps import ACROSS_ROWS, BREAKS, EVERYWHERE, INIT, REFUSED

import pcg_ref as pcg

DRAWN_AT = 97  # a prime that divides no other dimension: a dimension that is a multiple of it depends on T
HEAD = "import torch\nfrom program_ops import *\nfrom torch import nn\n"
_names = itertools.count()


@dataclass
class Program:
    """Lines of Python, and what is known of them.

    Attributes:
        init: Lines of ``__init__``, with ``device`` at hand.
        steps: Lines of ``forward``, one step each.
        result: What it returns.
    """

    init: list[str]
    steps: list[str]
    result: str

    @property
    def source(self) -> str:
        body = "\n".join(f"        {line}" for step in self.steps for line in step.split("\n"))
        init = "\n".join(f"        {line}" for line in ["super().__init__()", *self.init])
        return (
            f"{HEAD}\n\nclass Model(nn.Module):\n    def __init__(self, device):\n{init}\n\n"
            f"    def forward(self, tokens, positions):\n        T = tokens.shape[0]\n{body}\n        return {self.result}\n"
        )

    def uses(self, *names: str) -> bool:
        return any(name in step for step in self.steps for name in names)

    @property
    def reads_metadata(self) -> bool:
        return self.uses(*READS_METADATA)

    @property
    def has_breaks(self) -> bool:
        return self.uses("br_")

    def build(self, device) -> torch.nn.Module:
        return build(self.source, device)


def build(source: str, device) -> torch.nn.Module:
    """The module that the source defines."""
    name = f"<program {next(_names)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # errors name the line
    space: dict = {"__name__": "program"}
    exec(compile(source, name, "exec"), space)
    return space["Model"](device)


def _is(*, floating=None, dtype=None, dim=None):
    def fits(value):
        right = floating is None or value.is_floating_point()
        return right and dtype in (None, value.dtype) and dim in (None, value.dim())

    return fits


_FITS = {
    "a": _is(), "a0": _is(), "f": _is(floating=True, dim=2), "f0": _is(floating=True, dim=2), "F": _is(floating=True),
    "m": _is(dtype=torch.bool), "i": _is(dtype=torch.int64),
}  # fmt: skip
_CHANGES_THE_OBJECT = re.compile(r"\.(t|transpose|squeeze|unsqueeze)_\(")
_REFUSALS = (RuntimeError, TypeError, IndexError, ValueError, AttributeError)


@dataclass
class Grammar:
    """Draws one program.

    Args:
        rng: ``random.Random``, or anything with its methods ``choice`` and ``randrange``.
        across_rows: Allow rows to depend on each other and on their number, and inputs to be written.
        breaks: Allow eager breaks.
        host: Put in a step that no capture can hold.
    """

    rng: object
    across_rows: bool = False
    breaks: bool = False
    host: bool = False
    values: list[str] = field(default_factory=lambda: ["v", "w"])

    def draw(self) -> Program:
        rng = self.rng
        numbers = dict(s=rng.randrange(100) * 10, factor=rng.choice([2, -1]), shift=rng.choice([1, 3]), wide=rng.choice([True, False]))
        steps = ["v = self.embed(tokens % 7)", "w = v + positions[:, None]"]
        program = Program([line.format(**numbers) for line in INIT], steps, "w")
        kinds = {**EVERYWHERE, **(ACROSS_ROWS if self.across_rows else {}), **(BREAKS if self.breaks else {})}
        names = [*kinds, "split", "split", "in place", "in place", "views", "state"]  # what goes wrong most
        wanted = rng.randrange(3, 13)
        with self.trial(program):
            for attempt in range(5 * wanted):
                cut = program.uses("fz_", "self.block", "self.other")
                if cut and len(steps) >= wanted:
                    break
                name = "host" if self.host and attempt == wanted else "split" if not cut and attempt > wanted else rng.choice(names)
                if step := self.step(rng.choice((kinds | REFUSED)[name]), len(steps)):
                    steps.append(step)
            program.result = self.result()
        return program

    @contextmanager
    def trial(self, program: Program):
        """A place to run steps in as they are drawn."""
        tokens, positions = torch.arange(DRAWN_AT) * 5 % 31, torch.arange(DRAWN_AT) % 50
        self.model = program.build("cpu")
        self.space = dict(vars(program_ops), self=self.model, tokens=tokens, positions=positions, T=DRAWN_AT)
        self.state = {name: getattr(self.model, name) for name in ("state", "matrix", "count", "cache", "table")}
        read_only = [*self.model.parameters(), self.model.order, *([] if self.across_rows else [tokens, positions])]
        self.read_only = {_memory(tensor): (tensor, tensor.clone()) for tensor in read_only}
        with pcg.forward_context(pcg.PackedBatch(tokens, [40, 50, 7])), torch.no_grad():
            for step in program.steps:
                exec(step, self.space)
            yield

    def step(self, template: str, number: int) -> str | None:
        """The template with names put in, run, or ``None`` where torch or the rules refuse it."""
        for letter, fits in _FITS.items():
            while (place := "{" + letter + "}") in template:
                found = [name for name in self.values if fits(self.space[name])]
                if not found:
                    return None
                # Late values more often than early ones, or most of a program would be dead code.
                name = found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))]
                template = template.replace(place, name, -1 if letter.endswith("0") else 1)
        new = {"{n}": f"x{number}", "{p}": f"y{number}"}
        new = {place: name for place, name in new.items() if place in template}
        step = template.replace("{k}", str(self.rng.randrange(3)))
        for place, name in new.items():
            step = step.replace(place, name)
        return self.run(step, list(new.values()))

    def run(self, step: str, new: list[str]) -> str | None:
        kept = {*map(_memory, self.state.values()), *self.read_only}
        if _CHANGES_THE_OBJECT.search(step) and kept & {_memory(self.space[name]) for name in self.values if name in step}:
            return None  # the module's own tensors keep their shapes
        tensors = {**{name: self.space[name] for name in self.values}, **self.state}
        tensors |= {str(memory): tensor for memory, (tensor, _) in self.read_only.items()}
        before = {name: (tensor, tensor._version) for name, tensor in tensors.items()}
        try:
            exec(step, self.space)
            made = [self.space[name] for name in new]
            written = [tensor for tensor, version in before.values() if tensor._version != version]
            good = all(isinstance(tensor, torch.Tensor) and tensor.numel() for tensor in made)
            good = good and self.rows_are_independent(step, made + written)
        except _REFUSALS:
            good = False
        if not good or {*map(_memory, written)} & self.read_only.keys():
            for tensor, value in self.read_only.values():
                tensor.copy_(value)
            self.values = [name for name in self.values if name not in new]
            return None
        self.values += new
        for name, tensor in self.state.items():  # what stays from batch to batch must not grow
            if any(_memory(w) == _memory(tensor) for w in written) and "remainder_" not in step:
                step += f"\nself.{name}.remainder_({MODULUS})"
        return step

    def rows_are_independent(self, step: str, tensors: list[torch.Tensor]) -> bool:
        if self.across_rows:
            return True
        by_row = [tensor.dim() and tensor.shape[0] == DRAWN_AT for tensor in tensors]
        if any(size % DRAWN_AT == 0 for tensor, rows in zip(tensors, by_row) for size in tensor.shape[1 if rows else 0 :]):
            return False
        read = set(re.findall(r"\w+", step.replace("tokens.device", "")))
        of_rows = {"tokens", "positions", "T", *self.names_of_rows()}
        return all(by_row) or not read & of_rows or "fz_total" in step

    def names_of_rows(self) -> list[str]:
        return [name for name in self.values if self.space[name].dim() and self.space[name].shape[0] == DRAWN_AT]

    def result(self) -> str:
        rng = self.rng
        if self.across_rows:
            taken = [rng.choice(self.values) for _ in range(rng.randrange(5))] + self.values[-1:]
            return ", ".join(taken) + ("," if len(taken) == 1 and rng.choice([True, False]) else "")
        rows = self.names_of_rows()
        if rng.randrange(4) == 0:
            return rng.choice(rows)
        return f"torch.cat([{', '.join(f'{name}.reshape(T, -1).double()' for name in rows[-6:])}], dim=1)"  # little of it is dead code


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
