"""Trace and compile kernels; print one JSON line per row of the catalogue.

    python -m parity_tests.support.traced

`properties/test_traced.py` runs this as a program, because jaxtyping's run-time checks under pytest cannot
be traced.
"""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from composer_plugins.testing.inputs import Batch, draw
from composer_plugins.testing.settings import Setting, main_tensor, settings
from parity_tests.support.every import row_id, rows


def positional(setting: Setting, batch: Batch) -> tuple[Callable[..., Any], list[Tensor]]:
    """The kernel as a function of its tensors alone: parameters are constants of a traced graph."""
    names = [name for name, x in batch.items() if isinstance(x, Tensor)]
    constants = {name: x for name, x in batch.items() if name not in names}
    space: dict[str, Any] = {"function": partial(setting.loss.kernel(), **constants, **setting.params)}
    # fx wants the arguments by name: it makes none of *args.
    optional = [f"{name}={name}" for name in names if name not in setting.loss.needs]
    call = ", ".join([*(name for name in setting.loss.needs if name in names), *optional])
    exec(f"def kernel({', '.join(names)}): return function({call})", space)
    return space["kernel"], [batch[name] for name in names]


def gradients(result: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Of the sum, with respect to whatever asks for one."""
    wanted = [x for x in inputs if x.requires_grad]
    return list(torch.autograd.grad(main_tensor(result).sum(), wanted)) if wanted else []


def same(ours: Any, eager: Any, inputs: list[Tensor]) -> None:
    """Assert the same value, metrics and gradient, bit for bit."""
    for a, b in zip(tree_leaves(ours), tree_leaves(eager), strict=True):
        assert torch.equal(a, b), f"value {a} is not {b}"
    for a, b in zip(gradients(ours, inputs), gradients(eager, inputs), strict=True):
        assert torch.equal(a, b), f"gradient {a} is not {b}"


def fx(setting: Setting, batch: Batch) -> None:
    """`torch.fx.symbolic_trace` gives a graph with the same numbers, on other numbers too."""
    kernel, inputs = positional(setting, batch)
    graph = torch.fx.symbolic_trace(kernel)
    same(graph(*inputs), kernel(*inputs), inputs)
    half = [x.detach().bfloat16() if x.is_floating_point() else x for x in inputs]
    same(graph(*half), kernel(*half), half)


def compiled(setting: Setting, batch: Batch) -> None:
    """`torch.compile` takes the kernel in one graph, forward and backward."""
    kernel, inputs = positional(setting, batch)
    torch._dynamo.reset()
    compile_ = torch.compile(kernel, fullgraph=True, backend="aot_eager", dynamic=False)
    same(compile_(*inputs), kernel(*inputs), inputs)


def fake(setting: Setting, batch: Batch) -> None:
    """The kernel runs on tensors that hold no numbers: nothing in it waits for one."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        kernel, inputs = positional(setting, batch)
        inputs = [mode.from_tensor(x) for x in inputs]
        gradients(kernel(*inputs), inputs)


def report(setting: Setting) -> dict[str, str]:
    """What fails for a setting, by the name of the compiler."""
    batch = draw(setting, tokens=5, dtype=torch.float32)
    for name in setting.trained:
        batch[name].requires_grad_()
    checks = [compiled, fake, *([fx] if setting.loss.kind == "policy" else [])]
    failures = {}
    for check in checks:
        try:
            check(setting, batch)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            failures[check.__name__] = f"{type(error).__name__} in {last.name}: {str(error)[:600]}"
    return failures


def main() -> None:
    """Print {"row": id, "failures": {"setting: compiler": why}} for each row whose id is an argument."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for row in (one for one in rows() if row_id(one) in sys.argv[1:]):
        failures = {}
        try:
            for setting in settings(row, thorough=False):
                failures |= {f"{setting.label}: {c}": why for c, why in report(setting).items()}
        except Exception as error:  # inputs that cannot be drawn, a kernel that cannot be imported
            failures[row.name] = f"{type(error).__name__}: {error}"
        print(json.dumps({"row": row_id(row), "failures": failures}), flush=True)


if __name__ == "__main__":
    main()
