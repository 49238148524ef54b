"""What ``python -m pcg_ref demo`` prints. Each function takes what was measured, and returns lines; nothing is computed here."""

from __future__ import annotations

import re
import textwrap

WIDTH = 116


def run(about: dict) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        f"{about['model']}: {about['class']}, {about['parameters'] / 1e6:.3g} million parameters, {about['dtype']} on "
        f"{about['device']}, {about['hardware']}",
        versions,
    ]
    if about["simulation"]:
        lines.append("No CUDA device: graphs are simulated by tapes, with the same semantics and no gain in speed.")
    return lines


def trace(found: dict | None, strategy: str) -> list[str]:
    lines = ["", "1. Trace"]
    if found is None:
        whys = {"full": "nobody looks for boundaries", "eager": "nothing is captured", "breakable": "the capture finds boundaries"}
        return [*lines, f"   None, and no FX graph: with strategy {strategy!r} {whys[strategy]}."]
    return lines + [
        f"   One FX graph: {_count(found['nodes'], 'node')}, {_count(found['parameters'], 'parameter')}, "
        f"{_count(found['buffers'], 'buffer')}, the token dimension T dynamic.",
        f"   {_count(found['compile_count'], 'call')} of the compiler's backend, {found['seconds']:.1f} s.",
    ]


def split(found: dict | None) -> list[str]:
    lines = ["", "2. Split"]
    if found is None:
        return [*lines, "   None: no FX graph is cut. Eager segments, if there are any, are found by the capture."]
    graphs = found["pieces"] - found["eager_pieces"]
    lines.append(f"   {_count(found['pieces'], 'piece')}, cut at {', '.join(found['split_ops'])}: {graphs} for graphs, "
                 f"{found['eager_pieces']} eager. The first layer:")  # fmt: skip
    for piece in found["first_pieces"]:
        lines += _wrapped(piece["facts"][0], "   ")
        lines += [line for fact in [*piece["facts"][1:], "from " + _folded(piece["modules"])] for line in _wrapped(fact, "     ")]
    return lines + ["   python -m pcg_ref split shows the code, split --boundaries whose memory each tensor is."]


def capture(found: dict) -> list[str]:
    lines = ["", "3. Capture"]
    if not found["buckets"]:
        return [*lines, "   Nothing: every batch runs eagerly."]
    choice = "as asked for" if found["asked_for"] else "the powers of two that these batches need"
    lines.append(f"   Buckets: {choice}; the largest first, into one pool of {found['pool_bytes'] / 2**20:.1f} MiB:")
    for bucket, row in reversed(found["buckets"].items()):
        segments = f"{_count(row['graphs'], 'graph')}, {_count(row['eager_segments'], 'eager segment')}"
        lines.append(f"   {bucket:>6} tokens  {segments}, {row['capture_ms'] / 1e3:.2f} s")
    return lines


def oracle(text: str) -> list[str]:
    return ["", "4. Batches", f"   Every real token's logits, compared with {text}."]


def batch(number: int, found: dict) -> list[str]:
    how = f"run eagerly ({found['ran_eagerly']})"
    if found["bucket"] is not None:
        segments = found["graphs"] + found["eager_segments"]
        how = f"in bucket {found['bucket']}, {_count(found['padding'], 'row')} of padding, {_count(segments, 'segment')} replayed"
    lines = [f"   Batch {number}: {_count(found['tokens'], 'token')} {how}"]
    for request in found["requests"]:
        prompt = textwrap.shorten(request["prompt"], 76, placeholder=" ...")
        other = "" if request["next"] == request["next_of_oracle"] else f" (reference: {request['next_of_oracle']})"
        lines.append(f"     {request['tokens']:>5} tokens  {prompt:<76} -> {request['next']}{other}")
    verdict = "equal up to rounding" if found["equal"] else "NOT EQUAL"
    return lines + [
        f"     largest difference {found['max_difference']:.1e} ({found['relative']:.1e} of the row), same argmax in "
        f"{found['same_argmax']} of {_count(found['tokens'], 'row')}: {verdict}"
    ]


def timing(document: dict) -> list[str]:
    about = document["run"]
    lines = ["", f"5. Milliseconds a batch, medians; {about['dtype']} on {about['device']}, torch {about['versions']['torch']}"]
    if about["simulation"]:
        lines.append("   This is the tape simulation on a CPU, and no measure of speed: a tape calls every operator again, one by one.")
    lines.append(f"   {'batch':>5} {'requests':>9} {'tokens':>7} {'bucket':>7} {'rounds':>7} {'eager':>9} {'replay':>9}")
    for row in document["timing"]:
        replay = "-" if row["replay_ms"] is None else f"{row['replay_ms']:.2f}"
        lines.append(f"   {row['batch']:>5} {row['requests']:>9} {row['tokens']:>7} {row['bucket'] or '-':>7} {row['rounds']:>7} "
                     f"{row['eager_ms']:>9.2f} {replay:>9}")  # fmt: skip
    seconds = document["seconds"]
    spent = ", ".join(f"{what} {value:.1f}" for what, value in seconds.items())
    return [*lines, "", f"Where the time went, in seconds: {spent}; together {sum(seconds.values()):.1f}."]


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _folded(modules: list[str]) -> str:
    """``a.b.x, a.b.y, a.c`` as ``a.b.{x, y}, a.c``."""
    groups: list[tuple[str, list[str]]] = []
    for module in modules:
        parent, _, name = module.rpartition(".")
        if groups and groups[-1][0] == parent:
            groups[-1][1].append(name)
        else:
            groups.append((parent, [name]))
    texts = [f"{{{', '.join(names)}}}" if parent and len(names) > 1 else ", ".join(names) for parent, names in groups]
    return ", ".join(f"{parent}.{text}" if parent else text for (parent, _), text in zip(groups, texts))


def _wrapped(text: str, indent: str) -> list[str]:
    # A shape stays on one line: a space that does not break stands in for those in brackets.
    text = re.sub(r"\[[^]]*\]|\{[^}]*\}", lambda match: match[0].replace(" ", "\0"), text)
    text = re.sub(r"(\w) \[", "\\1\0[", text)
    lines = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + " " * 6, break_long_words=False)
    return [line.replace("\0", " ") for line in lines]
