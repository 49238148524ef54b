"""The command line: ``python -m pcg_ref {check,demo,split,bench}``.

Exit code 0 is success, 1 a result that is wrong, 2 a mistake of the caller, told in one line. What a command needs is imported when
it runs, so that ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


class UserError(Exception):
    """A mistake that the caller can mend; the message says how."""


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage before every complaint, and exits; a line is enough."""

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; by default those of this process.

    Returns:
        The exit code.

    Raises:
        SystemExit: After ``--help``.
    """
    from pcg_ref.explain import TraceError

    try:
        options = _parser().parse_args(argv)
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more while it ends
        return 0
    except (UserError, ValueError, ImportError, TraceError) as error:  # what the package raises for what a caller can change
        print(f"pcg_ref: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    from pcg_ref.compilers import COMPILERS
    from pcg_ref.validation import STRATEGIES

    parser = _Parser(prog="python -m pcg_ref", description="Piecewise CUDA Graph, readable: trace, split, capture, replay.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="{check,demo,split,bench}")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", default="smollm2", metavar="{tiny,smollm2,ID,PATH}",
                       help="tiny: random weights, needs torch alone; smollm2: a real chat model (default); or what transformers "
                            "finds by a Hugging Face id or a local path")  # fmt: skip

    check = commands.add_parser("check", help="what this machine has, and what follows from it")
    check.set_defaults(run=lambda options: _check())

    demo = commands.add_parser("demo", parents=[model], help="the whole path on chat prompts, compared with the model itself")
    demo.add_argument("--strategy", choices=STRATEGIES, default="tc_piecewise", help="who finds the boundaries (%(default)s)")
    demo.add_argument("--compiler", choices=sorted(COMPILERS), default="eager", help="what runs inside the graphs (%(default)s)")
    demo.add_argument("--buckets", type=_buckets, metavar="N,N,...", help="sizes to capture (powers of two that the batches need)")
    demo.add_argument("--prompts", metavar="FILE", help="one prompt a line")
    demo.add_argument("--json", action="store_true", help="one JSON document on stdout, and nothing else there")
    demo.set_defaults(run=_demo)

    split = commands.add_parser("split", parents=[model], help="the pieces of a model, as code")
    split.add_argument("--layers", type=_natural, default=1, help="how many layers to write out (%(default)s); 0 for all")
    split.add_argument(
        "--boundaries", action="store_true", help="the tensors that cross the cuts, in place of the code: bytes, owner, address"
    )
    split.add_argument("--dot", metavar="FILE", help="write the drawing of the pieces as DOT text")
    split.add_argument("--svg", metavar="FILE", help="write the drawing of the pieces as SVG")
    split.set_defaults(run=_split)

    bench = commands.add_parser("bench", help="every strategy, and what else one would use, timed in one interleaved run")
    bench.add_argument("--model", default="tiny", metavar="{tiny,qwen3-0.6b-shape,smollm2,ID,PATH}",
                       help="qwen3-0.6b-shape: that configuration with random weights; the others as for demo (%(default)s)")  # fmt: skip
    bench.add_argument("--tokens", type=_buckets, default=[16, 64, 256], metavar="N,N,...", help="sizes of the batches (16,64,256)")
    bench.add_argument("--rounds", type=_positive, default=30, help="timed rounds a size (%(default)s)")
    bench.add_argument("--requests", type=_positive, default=4, help="requests in a batch, of uneven lengths (%(default)s)")
    bench.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,...", help="these systems, and eager")
    bench.add_argument("--seed", type=int, default=0, help="of batches and orders (%(default)s)")
    bench.add_argument("--json", action="store_true", help="one JSON document on stdout, and nothing else there")
    bench.add_argument("--record", metavar="FOLDER", help="write the JSON and a plot there, for example figures/h200")
    bench.set_defaults(run=_bench)
    return parser


def _buckets(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes; write for example 64,128,256") from None
    if min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{min(sizes)} cannot be captured; sizes start at 2")
    return sizes


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layers; write 0 for all")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _check() -> int:
    from pcg_ref import check

    return check.main()


def _demo(options: argparse.Namespace) -> int:
    from pcg_ref import demo

    prompts = demo.PROMPTS if options.prompts is None else _read_prompts(options.prompts)
    _require_compiler(options)
    return demo.main(prompts, options.model, options.strategy, options.compiler, options.buckets, options.json)


def _read_prompts(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts from {path}: {getattr(error, 'strerror', None) or error}") from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise UserError(f"{path} holds no prompt; write one a line")
    return prompts


def _require_compiler(options: argparse.Namespace) -> None:
    """Refuse now what would fail only after the model is loaded."""
    if options.compiler == "eager":
        return
    if options.strategy in ("breakable", "eager"):
        raise UserError(f"strategy {options.strategy!r} uses no compiler; leave --compiler out, or choose --strategy tc_piecewise")
    import torch

    from pcg_ref.check import find_cpp_compiler

    if not torch.cuda.is_available() and find_cpp_compiler() is None:
        raise UserError("--compiler inductor needs a C++ compiler and Python's headers; see python -m pcg_ref check")


def _bench(options: argparse.Namespace) -> int:
    from pcg_ref.bench.main import main as bench

    return bench(options.model, options.tokens, options.rounds, options.requests, options.only, options.json, options.record,
                 options.seed)  # fmt: skip


def _split(options: argparse.Namespace) -> int:
    import torch

    from pcg_ref.demo_model import load
    from pcg_ref.show import boundary_text, draw_boundaries, draw_split, split_text
    from pcg_ref.splitting import split_graph
    from pcg_ref.strategies.tc_piecewise import trace_with_example

    subject = load(options.model, torch.device("cpu"), torch.float32)
    split_gm, items = split_graph(trace_with_example(subject.model, torch.device("cpu")).graph_module)
    drawing = (draw_boundaries if options.boundaries else draw_split)(split_gm, items, options.layers)
    try:
        if options.dot:
            Path(options.dot).write_text(str(drawing), encoding="utf-8")
        if options.svg:
            drawing.save(options.svg)
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write the drawing: {error}") from None
    if not (options.dot or options.svg):
        print((boundary_text if options.boundaries else split_text)(split_gm, items, options.layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
