"""Sixteen hazards of CUDA graphs, each as two small programs: one that falls into it, one that is protected.

``table(device)`` runs them all. The hazards are kinds that users of CUDA graphs have met, known from public reports; the programs are
ours. Nothing here is needed to use the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from pcg_ref.bench.record import provenance
from pcg_ref.hazards import addresses, cuts, lifetimes, serving
from pcg_ref.hazards.common import Verdict, judge


@dataclass(frozen=True)
class Hazard:
    """One kind of fault.

    Attributes:
        number: Its number, ``"H1"`` to ``"H16"``.
        title: What goes wrong.
        why: Why it does, in a sentence.
        seen_in: Public reports that the kind was learned from.
        naive: ``naive(device) -> Verdict``, the program that falls into it.
        protected: ``protected(device) -> Verdict``, the same through this package.
        differs: Why the tape's verdicts are not CUDA's, or ``None`` where they must agree.
    """

    number: str
    title: str
    why: str
    seen_in: tuple[str, ...]
    naive: Callable[[torch.device | str], Verdict]
    protected: Callable[[torch.device | str], Verdict]
    differs: str | None = None


_MODULES = (addresses, cuts, lifetimes, serving)


def _hazard(number: int, title: str, why: str, *seen_in: str) -> Hazard:
    find = lambda form: next(getattr(m, f"h{number}_{form}") for m in _MODULES if hasattr(m, f"h{number}_{form}"))  # noqa: E731
    return Hazard(f"H{number}", title, why, seen_in, find("naive"), find("protected"))


HAZARDS = (
    _hazard(
        1, "a split operator returns fresh memory",
        "The next graph holds the address of the first result; later ones lie elsewhere, and nothing copies them.",
        "vllm #37363", "vllm #37395", "vllm #53915",
    ),
    _hazard(
        2, "the next replay overwrites a result",
        "A result is a name for graph memory, and every replay writes there.",
        "pytorch #104435", "pytorch #144386", "pytorch #148439", "pytorch #170604",
    ),
    _hazard(
        3, "Python side effects are not replayed",
        "A graph holds device work; the Python around it ran once, at capture.",
        "pytorch #114844",
    ),
    _hazard(
        4, "a tuple crosses a cut",
        "A tuple has no address that could be frozen; it must be taken apart where it is made.",
        "vllm #28533",
    ),
    _hazard(
        5, "a torch.Size crosses a cut",
        "A compiler of pieces takes and returns tensors and numbers, and a torch.Size is neither.",
        "vllm #35635",
    ),
    _hazard(
        6, "a piece with nothing to launch is captured",
        "Views, sizes and allocations launch nothing; the graph is empty, and is submitted at every replay.",
        "vllm #28044", "pytorch #149653",
    ),
    _hazard(
        7, "a split operator is missed because of its spelling",
        "ns.op and ns.op.default are one operator under two printed names; the call that is missed is captured.",
    ),
    _hazard(
        8, "a write moves across a read",
        "An operator that writes and returns nothing has no reader by data dependence; only the order holds it in place.",
        "pytorch #163129", "vllm #26678",
    ),
    _hazard(
        9, "warm-up changes the model's state",
        "A region runs a few times before capture, and adds to its state each time.",
        "pytorch #103985", "pytorch #117281",
    ),
    _hazard(
        10, "a guard fails in the middle of serving",
        "What the model reads beside its inputs is guarded; a failed guard traces, compiles and captures again.",
        "sglang #20441", "sglang #16108", "sglang #13469",
    ),
    _hazard(
        11, "a batch is padded to many times its size",
        "The smallest size that fits may be many times the batch, and a graph computes all its rows.",
        "TensorRT-LLM #13574", "TensorRT-LLM #16256",
    ),
    _hazard(
        12, "padded rows are written to the cache",
        "A write inside the graph has as many rows as the bucket, with stale slots behind the real ones. The cache is a "
        "stand-in: the package has no KV cache yet.",
        "vllm #43869", "sglang #24743", "sglang #33253", "vllm #13418",
    ),
    _hazard(
        13, "metadata of an earlier batch is left in the padding",
        "A batch with fewer requests fills less of a static buffer, and the rest still describes the batch before.",
        "sglang #1469", "sglang #21452",
    ),
    _hazard(
        14, "garbage is collected during a capture",
        "A collection inside a capture may destroy a graph there, which is not permitted.",
        "pytorch #161037", "TransformerEngine #2092", "vllm #24128",
    ),
    _hazard(
        15, "every size takes memory of its own",
        "Ascending sizes do not fit into the blocks of smaller ones, and outputs that are owned are never given back.",
        "tokenspeed #1065", "pytorch #97419", "vllm #9724",
    ),
    _hazard(
        16, "weights move after capture",
        "The graph holds the address of the old tensor, and goes on with its numbers.",
    ),
)

Row = tuple[str, Verdict, Verdict]


def table(device: torch.device | str) -> list[Row]:
    """``(number, verdict of the naive form, verdict of the protected form)`` for every hazard, on ``device``."""
    return [(hazard.number, judge(hazard.naive, device), judge(hazard.protected, device)) for hazard in HAZARDS]


def render(rows: Sequence[Row], details: bool = False) -> str:
    """The table as text, a line a hazard; with ``details`` a paragraph, with the reason and the evidence."""
    hazards = {hazard.number: hazard for hazard in HAZARDS}
    if not details:
        return "\n".join(f"{number:<4} {hazards[number].title:<52} {naive.what:<26} {safe.what}" for number, naive, safe in rows)
    return "\n\n".join(
        f"{number}. {hazards[number].title}\n     {hazards[number].why}\n     naive      {naive}\n     protected  {protected}"
        for number, naive, protected in rows
    )


def save(folder: str | Path, device: torch.device | str) -> Path:
    """Run the table and write it, with everything that it depends on, to ``hazards.json`` in ``folder``."""
    rows = table(device)
    facts = provenance(torch.device(device), torch.float32, "python -m pcg_ref.hazards")
    path = Path(folder) / "hazards.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    hazards = [{"number": number, "naive": asdict(naive), "protected": asdict(protected)} for number, naive, protected in rows]
    path.write_text(json.dumps({"provenance": facts, "hazards": hazards}, indent=1) + "\n", encoding="utf-8")
    return path


def load(path: str | Path) -> tuple[dict[str, str], list[Row]]:
    """``(provenance, rows)`` of a table that ``save`` wrote."""
    run = json.loads(Path(path).read_text(encoding="utf-8"))
    return run["provenance"], [(h["number"], Verdict(**h["naive"]), Verdict(**h["protected"])) for h in run["hazards"]]
