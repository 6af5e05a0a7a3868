"""The cheap part of the checks, before every run of an own method or network: a few local updates of four examples."""

import time

import torch

from contrafed.check.changes import check_attributes, check_in_place, check_random_state
from contrafed.check.numbers import check_repeats
from contrafed.check.problem import make_problem
from contrafed.config.run_config import Run
from contrafed.core.errors import UserError
from contrafed.core.split_model import SplitModel
from contrafed.data.federation import Federation

CHEAP = (check_in_place, check_random_state, check_attributes)
EXAMPLES = 4
MAX_SECONDS = 10.0  # after which ``check_repeats`` is left out, the longest
LEFT_OUT = (
    "local updates are slow here, so this run began without the check whether two calls give the same output. "
    "contrafed check with the same keys has all checks"
)


def is_own(run: Run) -> bool:
    """Return whether a run's method or network is not one of the project's."""
    return any(choice.is_own for choice in (run.client.strategy, run.server, run.client.model))


def check_before_run(run: Run, federation: Federation, model: SplitModel) -> None:
    """Raise ``UserError`` if an own method or network fails a cheap check.

    If the others took long, the last one is left out, with a notice of the model. A method that raises is left to the
    run, which reports it with client, round and line.
    """
    if not is_own(run) or not len(federation.data.y) or run.evaluate_only is not None:
        return
    began, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        problem = make_problem(run, federation, model, (EXAMPLES,), torch.float32, epochs=1)
        problem.update([0])
        for check in (*CHEAP, check_repeats):
            if check is check_repeats and time.perf_counter() - began > MAX_SECONDS:
                model.notices = (*model.notices, LEFT_OUT)
            elif fault := check(problem):
                name = run.client.strategy.name
                raise UserError(
                    f"strategy={name}: with model={run.client.model.name}: {fault}. contrafed check has more checks"
                )
    except UserError:
        raise
    except Exception:
        return
    finally:
        torch.set_num_threads(threads)
