"""`python -m parity_tests.rigs.prime_rl_cpu --source CHECKOUT --loss default|DOTTED --out DIR`."""

import argparse
import json
from importlib import import_module
from pathlib import Path

from parity_tests.rigs.prime_rl_cpu import inputs
from parity_tests.rigs.prime_rl_cpu.trainer import run


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.rigs.prime_rl_cpu", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of PRIME-RL")
    parser.add_argument("--loss", default="default", help="a type of upstream's, or a dotted name of ours")
    parser.add_argument("--kwargs", default="{}", help="[trainer.loss.kwargs], or upstream's keys, as JSON")
    parser.add_argument("--float32", action="store_true", help="no bfloat16, under which roundings vanish")
    parser.add_argument("--recorded", action="store_true", help="SmolLM2 and its recorded replies")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="a folder for what it leaves behind")
    args = parser.parse_args()
    given = json.loads(args.kwargs)
    loss = {"type": args.loss, **given}
    if "." in args.loss:
        loss = {"type": "custom", "import_path": args.loss, "kwargs": given}
    data = import_module("parity_tests.rigs.prime_rl_cpu.recorded") if args.recorded else inputs
    run(args.source.resolve(), args.out.resolve(), loss, steps=args.steps, float32=args.float32, data=data)


if __name__ == "__main__":
    main()
