"""The picture of docs/denominators.md.

The weights are gradients of `aggregate`, so the picture shows what the code does.
"""

from fractions import Fraction

import torch

from composer_plugins.kernels.aggregation import Mode, aggregate

LENGTHS, LONGEST = (2, 6), 8
MODES: tuple[Mode, ...] = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
)
MISTAKE = "a mean of each micro-batch, averaged"
CELL, ROW, LEFT = 48, 28, 96
STYLE = "font-family: sans-serif; font-size: 14px"


def weights(mode: Mode) -> list[list[Fraction]]:
    """The weight of each token of the example's completions."""
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS).unsqueeze(-1)
    token_loss = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    total = aggregate(token_loss, mask, mode, max_length=LONGEST)
    (gradient,) = torch.autograd.grad(total, token_loss)
    return [
        [Fraction(x).limit_denominator(1000) for x in row[:n].tolist()]
        for row, n in zip(gradient, LENGTHS, strict=True)
    ]


def draw() -> str:
    """The picture as SVG."""
    blocks: list[tuple[str, list[list[Fraction]]]] = [(mode, weights(mode)) for mode in MODES]
    parts = Fraction(1, len(LENGTHS))
    blocks.append((MISTAKE, [[parts / n] * n for n in LENGTHS]))
    shapes, y = [], 16
    for title, rows in blocks:
        colour = "#b3261e" if title == MISTAKE else "#1a1c23"
        shapes.append(f'<text x="12" y="{y + 14}" font-weight="bold" fill="{colour}">{title}</text>')
        y += 24
        for i, row in enumerate(rows, 1):
            shapes.append(f'<text x="12" y="{y + 18}" fill="#4a4d57">completion {i}</text>')
            shapes += [_cell(LEFT + 8 + t * CELL, y, weight) for t, weight in enumerate(row)]
            y += ROW
        y += 20
    width = LEFT + 8 + max(LENGTHS) * CELL + 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" style="{STYLE}">'
    card = f'<rect width="{width}" height="{y}" rx="8" fill="#f5f6fa"/>'
    return "\n".join([head, card, *shapes, "</svg>"]) + "\n"


def _cell(x: int, y: int, weight: Fraction) -> str:
    """A token: the darker, the more it weighs."""
    share = min(1.0, 0.12 + float(weight) * 0.9)
    place = f'x="{x}" y="{y}" width="{CELL - 4}" height="{ROW - 4}" rx="3"'
    fill = f'<rect {place} fill="#3f51b5" fill-opacity="{share:.2f}"/>'
    ink = "#ffffff" if share > 0.6 else "#1a1c23"
    middle = x + (CELL - 4) // 2
    return f'{fill}<text x="{middle}" y="{y + 17}" text-anchor="middle" fill="{ink}">{weight}</text>'
