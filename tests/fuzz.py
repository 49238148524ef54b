"""The long campaign: ``make fuzz ARGS="--programs 2000 --seed 7"``.

Draws programs and scenarios, checks each, and stops at the first silent fault with the smallest program that still shows it, as Python
that can be run. Fails also if too few programs run to the end, because a campaign in which everything is refused finds nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import random
import sys
import time
import warnings
from collections import Counter

import torch
from campaign import InvalidProgram, SilentFault, check
from programs import Program
from scenarios import Run, draw

LEAST_SHARE = 0.6  # of the programs must run to the end without any refusal


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description="random modules in random scenarios against plain PyTorch")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="program N of seed S is the same everywhere")
    parser.add_argument("--start", type=int, default=0, help="the first program, to go on where another campaign ended")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inductor", type=int, default=0, metavar="N", help="every Nth program through inductor; slow; 0 for none")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # what torch says of programs that it refuses
    totals, reasons, begin = Counter(), Counter(), time.perf_counter()
    for number in range(options.start, options.start + options.programs):
        if number % 20 == 0:
            forget_compiled()
        rng = random.Random(f"{options.seed}/{number}")
        if options.inductor and number % options.inductor == 0:
            program, scenario = draw(rng, inductor=True, strategies=("tc_piecewise", "full"))
        else:
            program, scenario = draw(rng)
        try:
            outcome = check(program.build(options.device), scenario)
        except InvalidProgram as error:
            totals["invalid"] += 1
            reasons[f"no program: {error}"] += 1
            continue
        except SilentFault as fault:
            print(f"\n--- program {number} of seed {options.seed}: {fault}\nReducing it...", flush=True)
            program, scenario, fault = reduce(program, scenario, fault, options.device)
            print(reproduction(program, scenario, fault, options.device))
            return 1
        totals.update(programs=1, batches=outcome.batches, equal=outcome.ran, noticed=sum(outcome.noticed.values()))
        totals[scenario.strategy] += 1
        reasons.update(outcome.refused)
        if number % 100 == 99:
            print(f"{number + 1 - options.start:>6} programs, {totals['batches']} batches, {time.perf_counter() - begin:.0f} s", flush=True)
    return summary(options, totals, reasons, time.perf_counter() - begin)


def summary(options, totals: Counter, reasons: Counter, seconds: float) -> int:
    print("refused, by reason:" if reasons else "nothing was refused")
    for reason, count in reasons.most_common():
        print(f"{count:>6}  {reason}")
    share = totals["equal"] / max(totals["programs"], 1)
    by_strategy = ", ".join(f"{totals[name]} {name}" for name in ("tc_piecewise", "breakable", "full"))
    print(
        f"seed {options.seed} on {options.device}: {totals['programs']} programs ({by_strategy}), {totals['batches']} batches equal to "
        f"plain PyTorch, {totals['equal']} programs ({share:.0%}) without a refusal, {totals['noticed']} changes of attributes noticed, "
        f"{totals['invalid']} programs not valid, no silent fault, {seconds:.0f} s"
    )
    if share < LEAST_SHARE:
        print(f"FAILED: at least {LEAST_SHARE:.0%} of the programs must run without a refusal, or nothing is tested")
    return int(share < LEAST_SHARE)


def forget_compiled() -> None:
    """Every traced program stays in Dynamo's caches; and each capture collects garbage, which must not walk through torch's objects."""
    torch.compiler.reset()
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def reduce(program: Program, scenario, fault: SilentFault, device) -> tuple:
    """Leave out steps and events, one by one, as long as any silent fault is left."""
    progress = True
    while progress:
        progress = False
        for smaller in [*_without_a_step(program), *_without_an_event(scenario), *_plainer(scenario)]:
            candidate = (smaller, scenario) if isinstance(smaller, Program) else (program, smaller)
            try:
                torch.compiler.reset()
                check(candidate[0].build(device), candidate[1])
            except SilentFault as error:
                (program, scenario), fault, progress = candidate, error, True
                break
            except Exception:  # no program any more
                continue
    return program, scenario, fault


def _without_a_step(program: Program):
    for i in reversed(range(len(program.steps))):
        yield dataclasses.replace(program, steps=program.steps[:i] + program.steps[i + 1 :])


def _without_an_event(scenario):
    for i in reversed(range(len(scenario.events))):
        yield dataclasses.replace(scenario, events=scenario.events[:i] + scenario.events[i + 1 :])


def _plainer(scenario):
    plain = dict(fail_at=None, out_of_memory_at=None, debug=False, copy_output=True, replay="flat", compiler="eager")
    for name, value in plain.items():
        if getattr(scenario, name) != value:
            yield dataclasses.replace(scenario, **{name: value})
    for i, event in enumerate(scenario.events):
        if isinstance(event, Run) and event.fail_at is not None:
            yield dataclasses.replace(scenario, events=scenario.events[:i] + (Run(event.lengths, event.seed),) + scenario.events[i + 1 :])
    for size in scenario.sizes:
        if len(scenario.sizes) > 1:
            yield dataclasses.replace(scenario, sizes=tuple(s for s in scenario.sizes if s != size))


def reproduction(program: Program, scenario, fault: SilentFault, device) -> str:
    """Python that shows the fault; to be run in the repository's root with PYTHONPATH=.:tests."""
    return f"{program.source}\n\nfrom campaign import *\n\n# {fault}\ncheck(Model('{device}'), {scenario})\n"


if __name__ == "__main__":
    sys.exit(main())
