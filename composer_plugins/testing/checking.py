"""`check_loss`: every law on one loss, as scikit-learn's `check_estimator` does for an estimator."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from composer_plugins.calling_convention import Convention, Function, words_of
from composer_plugins.errors import ConfigError, did_you_mean, near, unknown, with_place
from composer_plugins.losses.choosing import row_named
from composer_plugins.losses.derived import function_named, row_of_function
from composer_plugins.losses.inputs import INPUTS
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Kind, Loss, check_kind
from composer_plugins.testing.laws import LAWS, Law, NotApplicable, laws_for
from composer_plugins.testing.report import FINDINGS, Finding, Outcome, Report
from composer_plugins.testing.settings import Setting, settings

MOST = 300  # characters of an exception: torch.compile's have paragraphs of advice
SHOWN = 3  # settings of a broken law that a report shows


def untold(text: str) -> None:
    """Show nothing."""


Named = Loss | str | Callable[..., Any]


def check_loss(loss: Named, *, kind: str | None = None, only: Iterable[str] = ()) -> Report:
    """Run every law on a loss, or `only` the laws of these names.

    `loss` is a name of the catalogue ("grpo"), a dialect ("grpo@trl"), an import path
    ("my_package.losses:my_loss"), a file ("my_losses.py:my_loss"), a function, or a row. Where two kinds
    share the name, the policy loss is meant unless `kind` names another. `kind` is needed where the first
    input of a function does not tell: "policy", "advantage", "divergence", "preference", "kl" or
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
    """The row of a loss, by name, import path, file or function; ConfigError if no loss is found.

    `options` are parameters of a function, in place of its defaults.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str) and not options:
        return row_named(loss, kind)
    if kind is not None:
        check_kind(kind, "kind")
    if not isinstance(loss, str):
        return row_of_function(loss, cast(Kind | None, kind), "loss", losses())
    if ":" not in loss:
        problem = f"{loss!r} is a loss of the catalogue, whose parameters are all varied"
        raise ConfigError("--option", problem, "remove it, or name a function")
    function, _ = with_options(function_named(loss, "loss"), None, options or {})
    return row_of_function(function, cast(Kind | None, kind), "loss", losses(), loss)


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
    """The laws of the kind of a row, or the named ones among them; ConfigError if no law fits."""
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


def check_row(row: Loss, only: Iterable[str] = (), tell: Callable[[str], None] = untold) -> Report:
    """Run every law of its kind on a row. `tell` is called with the name of each, before it is run."""
    laws = laws_for(row.kind)
    found = run_laws(laws_of(row, only), row, tell=tell, needed=first_of(laws.values()))
    stale = exceptions_without_a_law(row, laws, f"a {row.kind}")
    return Report(f"{row.name} ({row.kind})", (*stale, *found))


def first_of(laws: Iterable[Law]) -> list[Law]:
    """The laws which show that a loss can be looked at. They are run before any other that is chosen."""
    return [law for law in laws if law.first]


def exceptions_without_a_law(row: Loss, laws: Iterable[str], of: str) -> Iterator[Outcome]:
    """A failed outcome for each exception that the row declares and that none of these laws has."""
    named = {key.partition("(")[0].partition("+")[0].partition("@")[0] for key in row.exceptions}
    for name in sorted(named - {*laws}):
        cause = "a law that was renamed, a misspelling, or a law of other kinds: correct the row"
        problem = f"the row names it in its exceptions, and no law of {of} has that name"
        yield Outcome(name, "failed", problem, cause)


def run_laws(
    laws: Sequence[Law],
    row: Loss,
    of: type[Setting] = Setting,
    tell: Callable[[str], None] = untold,
    needed: Sequence[Law] = (),
) -> list[Outcome]:
    """Run laws on a loss in all its settings: with its defaults, optional inputs, dialects and choices.

    `needed` are run before them, and of these only what fails is returned. After a law which shows that the
    loss cannot be looked at, no other is run. An error that several laws meet is one finding, of the law for
    which it is worst.
    """
    unasked = [law for law in needed if law not in laws]
    if unasked and (failed := [one for one in run_laws(unasked, row, of) if one.status == "failed"]):
        return failed
    unusable, found, raised = "", list[Outcome](), dict[str, list[int]]()
    for number, law in enumerate(laws, 1):
        tell(f"{row.name}: law {number} of {len(laws)}, {law.name}")
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
