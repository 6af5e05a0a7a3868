"""A strategy that writes into a reply would change the client's state, which has the same tensors in this process."""

from test_strategy_faults import get_stop, rule


def test_replies_are_not_changed_in_place():
    def aggregate(self, model, replies):
        total = replies.models()[0]
        for other in replies.models()[1:]:
            for name in total:
                total[name] += other[name]
        return {name: value / len(replies) for name, value in total.items()}

    said = "round 1: Mine.aggregate must not change replies in place: what clients remember may be the same tensors"
    assert get_stop(rule(aggregate=aggregate)) == (said, "failed")
