"""`check_loss`: every law on one loss, as scikit-learn's `check_estimator` does for an estimator."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from composer_plugins.calling_convention import Convention, Function, words_of
from composer_plugins.errors import ConfigError, did_you_mean, near, unknown, with_place
from composer_plugins.losses.choosing import find_one
from composer_plugins.losses.derived import function_of_import_path, row_of_function
from composer_plugins.losses.inputs import INPUTS
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Kind, Loss, check_kind
from composer_plugins.testing.laws import LAWS, Law, NotApplicable, laws_for
from composer_plugins.testing.report import FINDINGS, Finding, Outcome, Report
from composer_plugins.testing.settings import Setting, settings

MOST = 300  # characters of an exception: those of torch.compile have paragraphs of advice
SHOWN = 3  # settings of a broken law that a report shows

Named = Loss | str | Callable[..., Any]


def check_loss(loss: Named, *, kind: str | None = None, only: Iterable[str] = ()) -> Report:
    """Run every law on a loss, or `only` the laws of these names.

    `loss` is a name of the catalogue ("grpo"), an import path ("my_package.losses:my_loss"), a file
    ("my_losses.py:my_loss"), a function, or a row. `kind` is needed where two kinds share the name, and where
    the first input of a function does not tell: "policy", "advantage", "divergence", "preference", "kl" or
    "correction".
    Raises ConfigError for a loss that cannot be loaded.
    """
    return check_row(find_row(loss, kind), only)


def parametrize_with_checks(
    named: Iterable[Named], *, kind: str | None = None, only: Iterable[str] = ()
) -> Any:
    """Parametrize a pytest test by `loss` and `check`, one check for each law of each loss.

        @parametrize_with_checks(["my_loss", "my_package.losses:another"])
        def test_my_losses_obey_the_laws(loss, check):
            check(loss)

    A check that does not apply skips the test, with the reason.
    """
    import pytest

    named = [named] if isinstance(named, str) else named
    cases = [
        pytest.param(row, partial(_pytest_check, law), id=f"{row.kind}-{row.name}-{law.name}")
        for row in (find_row(one, kind) for one in named)
        for law in laws_of(row, only)
    ]
    return pytest.mark.parametrize(("loss", "check"), cases)


def _pytest_check(law: Law, row: Loss) -> None:
    __tracebackhide__ = True
    (outcome,) = run_laws([law], row)
    if outcome.status == "not applicable":
        import pytest

        pytest.skip(outcome.detail)
    report = Report(row.name, (outcome,))
    assert report.passed, str(report)


def find_row(loss: Named, kind: str | None = None, options: Mapping[str, Any] | None = None) -> Loss:
    """The row of a loss, by name, import path or function; ConfigError if there is none, or several.

    `options` are parameters of a function, in place of its defaults.
    """
    if options:
        if not isinstance(loss, str) or ":" not in loss:
            problem = f"{loss!r} is a loss of the catalogue, whose parameters are all varied"
            raise ConfigError("--option", problem, "remove it, or name a function")
        function, _ = with_options(function_named(loss, "loss"), None, options)
        return replace(find_row(function, kind), name=loss)
    if isinstance(loss, Loss):
        return loss
    if kind is not None:
        check_kind(kind, "kind")
    if isinstance(loss, str) and loss.partition(":")[0].endswith(".py"):
        return replace(find_row(function_named(loss, "loss"), kind), name=loss)
    if not isinstance(loss, str):
        return row_of_function(loss, cast(Kind | None, kind), "loss", losses())
    if "@" in loss:
        base = loss.partition("@")[0]
        raise ConfigError("loss", f"{loss!r} is a dialect", f"check {base!r}, with all its dialects")
    return find_one(loss, kind).loss


def function_named(path: str, option: str) -> Callable[..., Any]:
    """The function of an import path, or of FILE.py:function; ConfigError at `option` if there is none."""
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        return function_of_import_path(path, option)
    place = Path(file).resolve()
    sys.path.insert(0, str(place.parent))  # for the modules next to it
    spec = spec_from_file_location(place.stem, place)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    try:
        sys.modules.setdefault(place.stem, module)  # a dataclass looks its module up
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(option, f"{file} fails: {with_place(error)}", "correct the file") from error
    if not callable(function := getattr(module, name, None)):
        functions = [one for one, x in vars(module).items() if callable(x) and not one.startswith("_")]
        raise unknown(option, name, functions, noun=f"function of {file}")
    return cast(Callable[..., Any], function)


def with_options(
    function: Function, convention: Convention | None, options: Mapping[str, Any]
) -> tuple[Function, Any]:
    """The function with the options that are parameters of its own, and the convention with the others.

    Raises ConfigError for a name that neither the function nor its source has.
    """
    if not options:
        return function, convention
    signature = inspect.signature(function).parameters
    takes = [name for name, one in signature.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    takes = [name for name in takes[1:] if name not in INPUTS]
    open_ended = len(takes) < len(signature) and any(
        one.kind is one.VAR_KEYWORD for one in signature.values()
    )
    parameters, others = dict[str, Any](), dict[str, Any]()
    for key, value in options.items():
        if key in takes:
            parameters[key] = value
            continue
        has_config = convention is not None and convention.has_config
        words = words_of(function) if has_config or open_ended else set[str]()
        if not {*key.split(".")} <= words:
            known = words or takes
            nearest = near(key.rpartition(".")[2], known)
            remedy = did_you_mean(nearest) if nearest else f"name one of {', '.join(takes)}"
            if not nearest and (has_config or not takes):
                remedy = "remove it, or read it in the function"
            raise ConfigError("--option", f"nothing in the function reads {key!r}", remedy)
        (others if has_config else parameters)[key] = value
    if parameters:
        given = partial(function, **parameters)
        vars(given).update(vars(function))
        for name in ("__name__", "__qualname__", "__module__"):
            setattr(given, name, getattr(function, name, ""))
        function = given
    if others:
        assert convention is not None
        convention = replace(convention, call=partial(cast(Function, convention.call), own=others))
    return function, convention


def laws_of(row: Loss, only: Iterable[str] = ()) -> list[Law]:
    """The laws of the kind of a row, or those of them that are named; ConfigError if there is none."""
    only = (only,) if isinstance(only, str) else tuple(only)
    require_known(only, LAWS)
    chosen = [law for law in laws_for(row.kind).values() if not only or law.name in only]
    if not chosen:
        laws = f"no law of {', '.join(only)}" if only else "no law"
        remedy = "composer-plugins check --laws says which kinds each law is for"
        key, problem = "only" if only else "check", f"{laws} is for losses of the kind {row.kind}"
        raise ConfigError(key, problem, remedy)
    return chosen


def require_known(only: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for a name that is not among these laws."""
    known = [*known]
    for name in only:
        if name not in known:
            raise unknown("only", name, known, noun="law")


def check_row(row: Loss, only: Iterable[str] = ()) -> Report:
    """Run every law of its kind on a row."""
    chosen = laws_of(row, only)
    stale = exceptions_without_a_law(row, laws_for(row.kind), f"a {row.kind}")
    return Report(f"{row.name} ({row.kind})", (*stale, *run_laws(chosen, row)))


def exceptions_without_a_law(row: Loss, laws: Iterable[str], of: str) -> Iterator[Outcome]:
    """A failed outcome for each exception that the row declares and that none of these laws has."""
    named = {key.partition("(")[0].partition("+")[0].partition("@")[0] for key in row.exceptions}
    for name in sorted(named - {*laws}):
        cause = "a law that was renamed, a misspelling, or a law of other kinds: correct the row"
        problem = f"the row names it in its exceptions, and no law of {of} has that name"
        yield Outcome(name, "failed", problem, cause)


def run_laws(laws: Iterable[Law], row: Loss, of: type[Setting] = Setting) -> list[Outcome]:
    """Run laws on a loss in all its settings: with its defaults, optional inputs, dialects and choices.

    After a law which shows that the loss cannot be looked at, no other is run. An error that several laws
    meet is one finding, of the law for which it is worst.
    """
    unusable, found, raised = "", list[Outcome](), dict[str, list[int]]()
    for law in laws:
        if unusable:
            found.append(Outcome(law.name, "not applicable", unusable))
            continue
        broken, inapplicable, held = dict[str, Exception | SystemExit](), list[str](), 0
        for setting in settings(row, thorough=law.thorough, of=of):
            try:
                law.check(setting)
                held += 1
            except NotApplicable as reason:
                inapplicable.append(str(reason))
            except (Exception, SystemExit) as error:
                broken[setting.label] = error
        outcome = _judged(law, broken, inapplicable, held, row)
        problems = {_problem(error) for error in broken.values()}
        asserted = any(isinstance(error, AssertionError) for error in broken.values())
        if outcome.status in FINDINGS and not asserted and len(problems) == 1:
            raised.setdefault(problems.pop(), []).append(len(found))
        found.append(outcome)
        usable = all(getattr(error, "usable", False) for error in broken.values())
        if law.first and not usable and outcome.status == "failed":
            unusable = f"not run: mend {law.name} first"
    for several in raised.values():
        worst = min(several, key=lambda i: [*FINDINGS].index(cast(Finding, found[i].status)))
        same = f"not run to its end: the error of {found[worst].check}"
        for i in {*several} - {worst}:
            found[i] = Outcome(found[i].check, "not applicable", same)
    return found


def _problem(error: Exception | SystemExit) -> str:
    return str(error)[:900] if isinstance(error, AssertionError) else with_place(error, most=MOST)


def _finding(law: Law, error: Exception | SystemExit) -> Finding:
    """What an error says of the loss: one that the loss raises with unusual inputs gives no wrong number."""
    if own := getattr(error, "finding", None):
        return cast(Finding, own)
    loud = law.finding == "failed" and not law.first and not isinstance(error, AssertionError)
    return "unsafe" if loud else law.finding


def _judged(
    law: Law,
    errors: Mapping[str, Exception | SystemExit],
    inapplicable: Iterable[str],
    held: int,
    row: Loss,
) -> Outcome:
    """What a report says of a law, with what the row declares about it."""
    broken = {label.removeprefix(row.name): error for label, error in errors.items()}
    declared = [
        key.removeprefix(law.name)
        for key in row.exceptions
        if key.startswith(law.name) and not key[len(law.name) : len(law.name) + 1].isidentifier()
    ]
    if law.name in row.exceptions:
        if broken:
            return Outcome(law.name, "not applicable", f"declared: {row.exceptions[law.name]}")
        return _stale(law, law.name)
    if broken and (excuse := law.excuse(row)):
        return Outcome(law.name, "not applicable", excuse)
    for suffix in declared:
        if suffix not in broken:
            return _stale(law, f"{law.name}{suffix}")
        del broken[suffix]
    if broken:
        shown = list(broken.items())[:SHOWN]
        lines = [f"{row.name}{suffix}: {_problem(error)}" for suffix, error in shown]
        if len(broken) > SHOWN:
            lines.append(f"and in {len(broken) - SHOWN} more settings: {', '.join(list(broken)[SHOWN:])}")
        raised = not all(isinstance(error, AssertionError) for error in errors.values())
        cause = next((own for error in broken.values() if (own := getattr(error, "cause", ""))), "")
        # The other laws call it with what it may not be made for.
        usual = f"usual cause: {law.causes.get(row.kind, law.cause)}"
        usual = "the loss itself raises this error" if raised and law.first else usual
        found = {_finding(law, error) for error in broken.values()}
        status = next(one for one in FINDINGS if one in found)
        return Outcome(law.name, status, "\n".join(lines), cause or usual)
    if not held and not declared:
        return Outcome(law.name, "not applicable", "; ".join(dict.fromkeys(inapplicable)))
    return Outcome(law.name, "passed")


def _stale(law: Law, key: str) -> Outcome:
    problem = f"the row declares the exception {key!r}, and the law holds without it"
    return Outcome(law.name, "failed", problem, "usual cause: the loss was mended: remove the exception")
