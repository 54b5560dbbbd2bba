"""Laws of tracing: torch.fx, torch.compile in one graph, tensors without numbers.

They cannot run where jaxtyping checks annotations at run time (`--jaxtyping-packages`).
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from composer_plugins.testing.inputs import Batch
from composer_plugins.testing.law import EVERY, law, require_equal
from composer_plugins.testing.settings import Setting, main_tensor

DATA_DEPENDENT = (
    "a Python branch on a tensor, .item(), bool(x), or a shape that depends on numbers: use torch.where. "
    "Each such place waits for the device, too"
)


# The values of parameters do not change what can be traced: `thorough` is off.
of_tracing = partial(law, thorough=False, finding="untraceable")
of_compiling = of_tracing(*EVERY, cause=DATA_DEPENDENT, no_function="the framework does not compile it")


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
    return (
        list(torch.autograd.grad(main_tensor(result).sum(), wanted, materialize_grads=True)) if wanted else []
    )


def require_same(ours: Any, eager: Any, inputs: list[Tensor]) -> None:
    """Require the same value, metrics and gradient, bit for bit."""
    for a, b in zip(tree_leaves(ours), tree_leaves(eager), strict=True):
        require_equal(a, b, "the traced value")
    for a, b in zip(gradients(ours, inputs), gradients(eager, inputs), strict=True):
        require_equal(a, b, "the traced gradient")


def drawn(setting: Setting) -> Batch:
    """A batch in float32, whose trained inputs ask for a gradient."""
    batch = setting.draw(tokens=5, dtype=torch.float32)
    for name in setting.trained:
        batch[name].requires_grad_()
    return batch


@of_tracing(
    "policy",
    cause=f"{DATA_DEPENDENT}. For fx a branch on a dtype is one too, though not for torch.compile: "
    "kernels.masking.at_least_float32 has none",
    no_function="the framework does not trace it",
)
def torch_fx_traces_it(setting: Setting) -> None:
    """`torch.fx.symbolic_trace` gives a graph with the same numbers, on other numbers too."""
    kernel, inputs = positional(setting, drawn(setting))
    graph = torch.fx.symbolic_trace(kernel)
    require_same(graph(*inputs), kernel(*inputs), inputs)
    half = [x.detach().bfloat16() if x.is_floating_point() else x for x in inputs]
    require_same(graph(*half), kernel(*half), half)


@of_compiling
def torch_compile_takes_it_in_one_graph(setting: Setting) -> None:
    """`torch.compile(fullgraph=True)` gives the same numbers, forward and backward."""
    kernel, inputs = positional(setting, drawn(setting))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager", dynamic=False)
        require_same(compiled(*inputs), kernel(*inputs), inputs)


@of_compiling
def it_runs_on_tensors_without_numbers(setting: Setting) -> None:
    """The kernel runs on fake tensors, forward and backward: nothing in it waits for the device."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        kernel, inputs = positional(setting, drawn(setting))
        inputs = [mode.from_tensor(x) for x in inputs]
        gradients(kernel(*inputs), inputs)


TRACED = (torch_fx_traces_it, torch_compile_takes_it_in_one_graph, it_runs_on_tensors_without_numbers)
