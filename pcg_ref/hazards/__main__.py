"""``python -m pcg_ref.hazards [FOLDER]``: run every hazard, and with a folder keep what CUDA said in ``FOLDER/hazards.json``."""

from __future__ import annotations

import argparse
import sys

import torch

from pcg_ref.hazards import load, render, save, table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pcg_ref.hazards", description="Run every hazard, naive and protected.")
    parser.add_argument("folder", nargs="?", help="keep what CUDA said in FOLDER/hazards.json; needs a GPU")
    folder = parser.parse_args(arguments).folder
    cuda = torch.cuda.is_available()
    if folder is None:
        print(render(table("cuda" if cuda else "cpu"), details=True))
        return 0
    if not cuda:
        print("a record is CUDA's: run this on a machine with a GPU, or without a folder to see the tape's table", file=sys.stderr)
        return 1
    path = save(folder, "cuda")
    print(render(load(path)[1], details=True))
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
