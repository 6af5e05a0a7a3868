"""FedHyper: rates by hand, their bounds, the golden problem, and FedAvg at a bound of 1."""

import pytest
from hand import COHORTS_WITH_ABSENCES, path, rule_of
from helpers import FULL_COHORTS, digits_run, run_scalar, same


def alphas(updates, **changes):
    """Return alpha and W after rounds of one reply."""
    rule, alpha, w = rule_of("fedhyper", **changes), [], [0.0]
    for update in updates:
        w += path(rule, [update], start=w[-1])[0]
        alpha.append(rule.round.metrics["alpha"])
    return alpha, w[1:]


def test_by_hand():
    """D = 1, 0.5, -1: alpha = 1, 1.5, 1 and W = 1, 1.75, 0.75."""
    alpha, w = alphas([1.0, 0.5, -1.0])
    assert alpha == pytest.approx([1, 1.5, 1], rel=1e-6)
    assert w == pytest.approx([1, 1.75, 0.75], rel=1e-6)
    assert alphas([1.0, 0.5, -1.0], hyper_rate=0.1)[0] == pytest.approx([1, 1.05, 1], rel=1e-6)


@pytest.mark.parametrize(("bound", "second"), [(5.0, 4.0), (3.0, 3.0)])
def test_bounds(bound, second):
    """D = 1, 3 would make alpha 4, D = 1, -9 makes it -8."""
    assert alphas([1.0, 3.0], bound=bound)[0] == pytest.approx([1, second], rel=1e-6)
    assert alphas([1.0, -9.0], bound=bound)[0] == pytest.approx([1, 1 / bound], rel=1e-6)


def test_a_round_without_replies_keeps_alpha_and_the_last_update():
    assert alphas([1.0, None, 0.5], bound=5.0)[0] == pytest.approx([1, 1, 1.5], rel=1e-6)
    assert alphas([1.0, None, 0.5])[1] == pytest.approx([1, 1, 1.75], rel=1e-6)


def by_hand(schedule, targets, rounds=5):
    """Both schedules on f_k = (w - a_k)^2 / 2 with two steps of 0.1: Delta = (1 - (1 - 0.1 alpha)^2) (a - W)."""
    w, alpha, last, found = 2.0, 1.0, None, []
    for _ in range(rounds):
        rate = 0.1 * (alpha if schedule != "global" else 1)
        change = (1 - (1 - rate) ** 2) * (sum(targets) / len(targets) - w)
        alpha = alpha if last is None else min(max(alpha + change * last, 1 / 5), 5)
        last = change
        w += change * (alpha if schedule != "local" else 1)
        found.append(w)
    return found


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize("schedule", ["global", "local", "both"])
def test_the_local_schedule_scales_the_clients_rate(schedule, stack_size):
    scaled = {"scale_step": schedule != "local", "scale_rate": schedule != "global"}
    found = run_scalar("fedhyper", FULL_COHORTS, targets=(0, 60, 30), stack_size=stack_size, **scaled)
    assert found == pytest.approx(by_hand(schedule, (0, 60, 30)), abs=1e-5)


def test_a_factor_of_1_changes_no_bit():
    own = {"bound": 1.0, "clients": 5, "schedule": COHORTS_WITH_ABSENCES}
    plain, scaled = (digits_run("fedhyper", 4, scale_rate=scale, **own)[0] for scale in (False, True))
    assert all(map(same, plain, scaled))


def test_a_rule_that_sends_no_factor_is_refused_in_one_line(expect_error):
    with expect_error("strategy.server"):
        digits_run("fedhyper", 1, clients=2, server="fedavgm", scale_rate=True)
