"""The largest relative difference between a checkout's losses and ours, in float64, as a Markdown table.

Of a value relative to itself, of a gradient relative to its largest entry, over drawn micro-batches.
`nox -s prime_rl -- --source DIR` prints it; alone it is `python -m parity_tests.support.prime_rl_table`, with
PRIME_RL_SOURCE=DIR.
"""

import sys

from parity_tests.support import prime_rl_live
from parity_tests.support.prime_rl_claims import claims, compared, drawn

BATCHES = 200


def main() -> None:
    """Print one Markdown row per loss of the checkout that PRIME_RL_SOURCE names."""
    checkout = prime_rl_live.source()
    if checkout is None:
        sys.exit(f"{prime_rl_live.SOURCE} names no checkout of PRIME-RL")
    upstream = prime_rl_live.load(checkout)
    print("| checkout | loss | micro-batches | value | gradient |\n|---|---|---|---|---|")
    for claim in claims(upstream):
        value = gradient = 0.0
        for seed in range(BATCHES):
            theirs, ours = compared(upstream, claim, drawn(upstream, seed), scale=1)
            value = max(value, float((ours[0] - theirs[0]).abs() / theirs[0].abs().clamp(min=1e-3)))
            largest = max(float(g.abs().max()) for g in theirs[1:])
            difference = max(float((a - b).abs().max()) for a, b in zip(ours[1:], theirs[1:], strict=True))
            gradient = max(gradient, difference / max(largest, 1e-3))
        print(f"| {checkout.name} | {claim.name} | {BATCHES} | {value:.1e} | {gradient:.1e} |")


if __name__ == "__main__":
    main()
