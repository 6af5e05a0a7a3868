"""All checks by name, and one line about each."""

from collections.abc import Callable, Iterator

from contrafed.check import changes, numbers
from contrafed.check.fault import Fault, Skipped, fault_of
from contrafed.check.problem import Problem

Check = Callable[[Problem], Fault | None]

# Name -> check, in the order of the report. The others need the first.
CHECKS: dict[str, Check] = {
    "a client trains and is evaluated": numbers.check_work,
    "two rounds run with the strategy": numbers.check_rounds,
    "clients count by their examples": numbers.check_weights,
    "the global random state is untouched": changes.check_random_state,
    "two calls give the same output": numbers.check_repeats,
    "alone equals stacked in float64": numbers.check_stack,
    "padding has no influence": numbers.check_padding,
    "examples do not influence each other in evaluation": numbers.check_examples,
    "copies of model and client work": changes.check_copies,
    "a client gains nothing between rounds": changes.check_attributes,
    "nothing is changed in place": changes.check_in_place,
    "an evaluation changes no state": changes.check_evaluation,
    "a loss computes with its params": changes.check_template,
    "every parameter takes part": changes.check_parameters,
    "training lowers the cross-entropy": changes.check_direction,
}


def run_checks(problem: Problem) -> Iterator[tuple[str, str, str]]:
    """Yield for each check its name, ``ok``, ``failed`` or ``skipped``, and what it found."""
    broken = ""
    for name, check in CHECKS.items():
        if broken:
            yield name, "skipped", f"because of: {broken}"
            continue
        try:
            fault = check(problem)
        except Skipped as reason:
            yield name, "skipped", str(reason)
            continue
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            fault = fault_of(f"raises {said}", problem.author.find_line(error))
        yield name, "failed" if fault else "ok", "" if fault is None else str(fault)
        if fault is not None and name == next(iter(CHECKS)):
            broken = name
