"""Record and show each round."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from contrafed.runs.output.console import Progress, format_count
from contrafed.runs.output.recorder import RunRecorder

if TYPE_CHECKING:  # importing torch takes longer than the command line's help
    from contrafed.engines.client_state import Cost
    from contrafed.server.base import FederatedStrategy, Round


def select_shown_scores(done: "Round", personal: bool) -> tuple[str, dict[str, float]]:
    """Return the scope and the test scores by which a round is shown, and by which a run may end.

    These are the clients' personal scores if they are evaluated, else the global model's. The result is empty between
    evaluations, and without answers.
    """
    if personal and done.evaluating:
        return "personal", done.client_evaluation or {}
    scores = done.evaluation or {}
    return "global", {name.removeprefix("test/"): value for name, value in scores.items() if name.startswith("test/")}


def select_validation_scores(done: "Round", personal: bool) -> dict[str, float]:
    """Return the scores on validation data, by which a round without test data is shown."""
    if personal:
        return done.client_validation or {} if done.evaluating else {}
    scores = done.evaluation or {}
    return {name.removeprefix("validation/"): v for name, v in scores.items() if name.startswith("validation/")}


# Every reply of so many rounds, of so many clients, must fail alike before a run ends: one client's data may be the cause.
MIN_FAILED_ROUNDS, MIN_FAILED_CLIENTS = 2, 3
# What a client says of an exception: where, then its type and its text, then the line of code.
FAILURE = re.compile(r".*?step \d+: (?P<kind>\w+): .*(?P<line>\([^()]*, line \d+\))$", re.DOTALL)

# How lines about a client begin.
CLIENT = re.compile(r"client (\d+)\b")


def _kind_of(failure: str) -> tuple[str, str] | None:
    """Return the type and the line of code of a client's exception, None if it says none."""
    found = FAILURE.match(failure)
    return None if found is None else (found["kind"], found["line"])


class RoundLog:
    """Writes each finished round to the run's folder, and updates the progress bar."""

    def __init__(
        self,
        recorder: RunRecorder,
        progress: Progress,
        strategy: "FederatedStrategy",
        memory_cost: Callable[[], "Cost | None"],
        every_failure: bool = False,
        follow: Callable[[int, dict[str, float]], None] = lambda server_round, values: None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        """Prepare the log.

        Args:
            recorder: The run's recorder.
            progress: The progress bar.
            strategy: The run's strategy.
            memory_cost: Returns the cost of client state since the last call.
            every_failure: Report rejected replies in every round, not only in the first such round.
            follow: Called after each round with its number and metrics, when its rows are on the disk.
            names: The names of clients that have one.
        """
        self.memory_cost, self.every_failure, self.follow, self.names = memory_cost, every_failure, follow, names or {}
        self.recorder, self.progress, self.strategy = recorder, progress, strategy
        self.num_clients = strategy.population.num_clients
        self.first_failure = ""  # the message of the first failed or rejected reply
        self.rounds = self.participants = self.failed = 0  # totals so far, and ``failed`` counts failures in training
        self.uncounted = 0  # replies of all causes
        self._failed_rounds, self._failed_clients, self._kinds = 0, set[int](), set[tuple[str, str] | None]()

    @property
    def shows_bug(self) -> bool:
        """Whether every reply of the first rounds failed with the same exception at the same line: a mistake in the method."""
        enough = min(MIN_FAILED_CLIENTS, self.num_clients - self.strategy.population.num_held_out)
        alike = len(self._kinds) == 1 and None not in self._kinds
        return alike and self._failed_rounds >= MIN_FAILED_ROUNDS and len(self._failed_clients) >= enough

    def write(self, done: "Round") -> None:
        """Record one round and flush."""
        put, t = self.recorder.metric, done.server_round
        for name, value in (done.evaluation or {}).items():
            split, metric = name.split("/")
            put(t, "global", split, metric, value)
        for name, value in (done.client_evaluation or {}).items():
            put(t, *(("personal", "test") if self.strategy.personal else ("global", "clients")), name, value)
        if self.strategy.personal or "validation/accuracy" not in (done.evaluation or {}):
            for name, value in (done.client_validation or {}).items():
                put(t, "personal" if self.strategy.personal else "global", "validation", name, value)
        for name, (ids, values) in done.client_metrics.items():
            self.recorder.clients(t, ids, name, values)
        if t > 0:
            for name, value in done.metrics.items():
                put(t, "global", "fit", name, value)
            self.rounds += 1
            self.participants += len(done.participants)
            self.failed += done.rejected["failed"]
            if 0 < self.participants == self.failed and (here := done.participants.tolist()):
                self._failed_rounds += 1
                self._failed_clients |= set(here)
                self._kinds |= set(map(_kind_of, done.failures[: len(here)]))
            self.uncounted += done.rejected.total()
            self.recorder.participants(t, done.participants, self.num_clients)
            put(t, "global", "system", "bytes_down", done.bytes_down)
            put(t, "global", "system", "bytes_up", done.bytes_up)
            put(t, "global", "system", "failures", done.num_failed)
            put(t, "global", "system", "replies_rejected", done.rejected.total() - done.num_failed)
            if done.lost:
                put(t, "global", "system", "lost", done.lost)
            if done.state_lost:
                put(t, "global", "system", "state_lost", done.state_lost)
            for name, value in done.simulated.items():
                put(t, "global", "time" if isinstance(value, float) else "system", name, value)
            self.recorder.time(t, done.seconds, done.aggregate_seconds, self.memory_cost(), done.largest_share)
        elif done.rejected:  # an evaluation of saved models has only round 0
            put(t, "global", "system", "failures", done.rejected.total())
        self.recorder.flush()
        self.follow(t, self.recorder.latest())
        _, scores = select_shown_scores(done, self.strategy.personal)
        held = {} if scores else select_validation_scores(done, self.strategy.personal)
        self.progress.split = "validation " if held else self.progress.split
        shown = scores or held
        self.progress.update(t, len(done.participants), shown.get("accuracy"), shown.get("loss"))
        for line in done.notes:
            self.progress.note(f"round {t}: {self._add_name(line)}")
        if done.failures and (self.every_failure or not self.first_failure):
            first = self._add_name(done.failures[0])
            self.first_failure = self.first_failure or first
            rejected = len(done.failures) - done.num_failed
            said = [f"{format_count(done.num_failed, 'client')} failed"] if done.num_failed else []
            said += [f"{format_count(rejected, 'reply was', 'replies were')} rejected"] if rejected else []
            self.progress.note(f"round {t}: {', '.join(said)}; the first: {first}")

    def _add_name(self, line: str) -> str:
        """Return a line about a client with the client's name after its number, if it has one."""
        found = CLIENT.match(line)
        name = "" if found is None else self.names.get(int(found[1]), "")
        return f"{found[0]} '{name}'{line[found.end() :]}" if found is not None and name else line
