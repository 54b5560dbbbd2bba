"""Small repositories from which one function was deleted, drawn from a seed.

A repository is a module of three functions of two numbers, and tests of the deleted one. What each function
computes is drawn: its name does not tell. So a model can learn it only from rewards and failing tests.
"""

import random
from dataclasses import dataclass

MODULES = ("stock", "route", "score", "paint")
NAMES = ("blend", "gauge", "merge", "count", "scale", "shift", "match", "trace")
HELPERS = ("load", "save", "sort", "join")  # the functions that are left
# At every pair of ARGUMENTS no two of these are equal, so the first test tells them apart.
EXPRESSIONS = ("a + b", "a - b", "a * b", "a // b", "a % b", "b * b", "max(a, b)", "min(a, b)")
ARGUMENTS = ((7, 2), (23, 5), (20, 3))


@dataclass(frozen=True)
class Case:
    """One test: a call, and the value that it should return."""

    arguments: tuple[int, ...]
    expected: int


@dataclass(frozen=True)
class Task:
    """A repository without one of its functions. `cases` are that function's tests."""

    module: str
    source: str
    function: str
    cases: tuple[Case, ...]
    solution: str  # the deleted function, for tests of the environment

    @property
    def prompt(self) -> str:
        """The task as the agent reads it."""
        return (
            f"The function {self.function}(a, b) of {self.module}.py was deleted. Write it again, so that "
            f"its tests pass. The rest of {self.module}.py:\n\n{self.source}"
        )

    def call(self, case: Case) -> str:
        """The call of a test, as Python."""
        return f"{self.function}({', '.join(map(str, case.arguments))})"


def make_tasks(seed: int) -> list[Task]:
    """The tasks of a seed: a repository for each of NAMES, which is the function that was deleted."""
    draw = random.Random(seed)
    return [draw_task(draw, name) for name in NAMES]


def draw_task(draw: random.Random, name: str, expression: str = "") -> Task:
    """A repository without its function of this name; `expression` is what it returns, otherwise drawn."""
    rest = {helper: draw.choice(EXPRESSIONS) for helper in draw.sample(HELPERS, 2)}
    return make_task(draw.choice(MODULES), rest, name, expression or draw.choice(EXPRESSIONS))


def make_task(module: str, rest: dict[str, str], name: str, expression: str) -> Task:
    """The task to write a function again; `rest` has the other functions and what they return."""
    source = "\n\n".join(function_source(*one) for one in rest.items())
    compute = eval(f"lambda a, b: {expression}")  # one of EXPRESSIONS
    cases = tuple(Case(arguments, compute(*arguments)) for arguments in ARGUMENTS)
    return Task(module, source, name, cases, function_source(name, expression))


def function_source(name: str, expression: str) -> str:
    """A function that returns an expression of its two arguments."""
    return f"def {name}(a, b):\n    return {expression}"
