"""The largest relative difference between verl's losses and ours in its registries, as Markdown tables.

`python -m parity_tests.support.verl_table`, where verl is installed. Relative to the largest term of the sum
behind a value, and to the largest entry of a gradient; in float64 unless a note says otherwise.
"""

from importlib.metadata import version

import torch

from parity_tests.support.verl_claims import LEFT_OUT, Claim, policies
from parity_tests.support.verl_drawn import drawn
from parity_tests.support.verl_estimates import advantages

BATCHES = 200


def worst(claim: Claim, count: int) -> tuple[int, list[float]]:
    """How many batches were compared, and the largest error of each kind."""
    found = [claim.errors(case) for case in drawn(claim.cases, count)]
    return len(found), [max(error.found for error in errors) for errors in zip(*found, strict=True)]


def show(claims: list[Claim], kind: str, numbers: tuple[str, ...], count: int) -> None:
    """Print one Markdown row per claim."""
    titles = (f"composer/ {kind}", "verl's", "batches", *numbers, "")
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for claim in claims:
        compared, largest = worst(claim, count)
        shown = " | ".join(f"{number:.1e}" if number else "0" for number in largest)
        print(f"| {claim.ours} | {claim.theirs} | {compared} | {shown} | {claim.note} |", flush=True)


def main(count: int = BATCHES) -> None:
    """Print the tables of the policy losses and of the estimators, and what is in neither."""
    torch.set_num_threads(1)
    print(f"verl {version('verl')}, largest relative difference:\n")
    show(policies(), "policy loss", ("value", "gradient"), count)
    print()
    show(advantages(), "estimator", ("value",), count)
    print("\nNot compared:\n\n" + "\n".join(f"- {name}: {reason}" for name, reason in LEFT_OUT.items()))


if __name__ == "__main__":
    main()
