"""Show a run in the terminal."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any

# Approximate number of lines that a run prints without a terminal.
MAX_PLAIN_LINES = 20
# Seconds between two updates of the bar, because an update costs more than a short round.
REDRAW_SECONDS = 0.125
VALIDATED = ("personal_validation_accuracy_mean", "validation_accuracy_final")  # numbers of a summary, the first that exists
# Columns of a terminal below which the bar's words are abbreviated, below which bar and speed are omitted, and below which
# clients and ETA are.
NARROW_BELOW, SHORT_BELOW, SHORTEST_BELOW = 105, 78, 62


class Progress:
    """A live bar with round, accuracy, loss, participants, rounds/s and ETA, or plain lines without a terminal."""

    def __init__(self, total_rounds: int, title: str) -> None:
        self.total = total_rounds
        self.title = title
        self.live = sys.stdout.isatty()
        self.split = ""  # before the word accuracy, if it is not on test data
        self._accuracy: float | None = None
        self._loss: float | None = None
        # Speed is measured from the first update, because starting the workers takes longer than many rounds.
        self._began = self._drawn = time.monotonic()
        self._base = 0
        self._next = 0.0
        self._latest: tuple[int, int] | None = None  # a round that is not shown yet, and its number of participants
        self._started = False
        self._width = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Progress":
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            print(self.title)
            console = Console()
            self._width = console.width
            self._bar = Bar(
                TextColumn("round"),
                MofNCompleteColumn(),
                *([BarColumn(bar_width=12)] if self._width >= SHORT_BELOW else []),
                TextColumn("{task.fields[numbers]}"),
                *([TextColumn("ETA"), TimeRemainingColumn(compact=True)] if self._width >= SHORTEST_BELOW else []),
                console=console,
                auto_refresh=False,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total, numbers="")
        else:
            print(f"{self.title}: {format_count(self.total, 'round')}", flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._latest is not None:  # an interrupted run: show where it stopped
            self._show(*self._latest)
        if self._bar is not None:
            self._bar.stop()

    def update(self, server_round: int, participants: int, accuracy: float | None, loss: float | None) -> None:
        """Show a finished round. Between evaluations (None) a bar keeps the last accuracy and loss, and a line has none."""
        self._accuracy = self._accuracy if self.live and accuracy is None else accuracy
        self._loss = self._loss if self.live and loss is None else loss
        now = time.monotonic()
        if not self._started:
            self._began, self._base = now, server_round
        last = server_round >= self.total
        if self._bar is not None:
            # The first one is drawn at once, so that a long first round does not look like a hanging run.
            due = last or not self._started or now - self._drawn > REDRAW_SECONDS
        else:
            # A line waits for the next evaluation, but not for long, so that runs with few evaluations print lines too.
            gap = self.total / MAX_PLAIN_LINES
            wait = 0 if accuracy is not None else gap
            due = last or not self._started or server_round >= self._next + wait
        if due:
            self._drawn, self._next, self._started = now, server_round + self.total / MAX_PLAIN_LINES, True
            self._show(server_round, participants)
        else:
            self._latest = (server_round, participants)

    def _show(self, server_round: int, participants: int) -> None:
        self._latest = None
        if self._bar is not None:
            self._bar.update(self._task, completed=server_round, numbers=self._numbers(server_round, participants))
            self._bar.refresh()
        else:
            rate = self._rate(server_round)
            eta = f"  ETA {(self.total - server_round) / rate:.0f} s" if rate and server_round < self.total else ""
            print(
                f"round {server_round:>{len(str(self.total))}}/{self.total}  {self._numbers(server_round, participants)}{eta}"
            )
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def _rate(self, server_round: int) -> float:
        return (server_round - self._base) / max(time.monotonic() - self._began, 1e-9)

    def _numbers(self, server_round: int, participants: int) -> str:
        accuracy = "-" if self._accuracy is None else f"{100 * self._accuracy:.2f}%"
        loss = "-" if self._loss is None else f"{self._loss:.4f}"
        rate = self._rate(server_round)
        speed = f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"  # rounds may take minutes
        if self.live and self._width < NARROW_BELOW:
            scores = f"{self.split[:3]}{' ' if self.split else ''}acc {accuracy:>6} loss {loss:>6}"
            text = scores if self._width < SHORTEST_BELOW else f"{scores} {participants:>3} clients"
            return text if self._width < SHORT_BELOW else f"{text} {speed} rounds/s"
        known = f"  {speed:>5} rounds/s" if rate or self.live else ""
        return f"{self.split}accuracy {accuracy:>7}  loss {loss:>6}  participants {participants:>3}{known}"


class _AtLeast(logging.Filter):
    """Accepts log records of at least ``level``."""

    level = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.level


_flower = _AtLeast()


def quiet_libraries(verbose: bool) -> None:
    """Silence Flower, Ray and similar libraries, and disable their telemetry. Call it before they are imported.

    The user's environment variables stay unchanged. Another call changes how much Flower prints.
    """
    for name, value in {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "1",
        "RAY_enable_metrics_collection": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_ERROR_REPORTING": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }.items():
        os.environ.setdefault(name, value)
    level = logging.INFO if verbose else logging.ERROR
    # Flower sets its logger's level when it is imported. A filter survives that.
    _flower.level = 0 if verbose or "FLWR_LOG_LEVEL" in os.environ else level
    logging.getLogger("flwr").addFilter(_flower)
    # Ray does the same with its own logger, and ray.init receives the effective level.
    for library in ("ray", "datasets", "httpx", "matplotlib", "tensorboard"):
        logging.getLogger(library).setLevel(level)
    if not verbose:
        warnings.filterwarnings("ignore", module=r"(ray|flwr|tensorboard|google)\b")


def format_count(number: int, word: str, words: str = "") -> str:
    """Return a number with its noun. ``words`` is the plural if an s is not enough."""
    return f"{number} {word if number == 1 else words or f'{word}s'}"


def print_summary(summary: Mapping[str, Any], folder: str) -> None:
    """Print the end of a run in a few lines."""

    def percent(key: str) -> str:
        value = summary.get(key)
        return "-" if value is None else f"{100 * value:.2f}%"

    mega = 1 / 2**20
    lines = []
    if summary.get("personal_accuracy_mean") is not None:
        mean, spread = percent("personal_accuracy_mean"), percent("personal_accuracy_std")
        best = percent("personal_accuracy_best")
        lines.append(f"personal accuracy: {mean} of the clients' test examples (+- {spread} over clients), best {best}")
    validated = [key for key in VALIDATED if summary.get(key) is not None]
    if validated and summary.get("select_on") == "validation":
        kind = "personal validation accuracy" if validated[0].startswith("personal") else "validation accuracy"
        best = percent(validated[0].replace("_mean", "_best").replace("_final", "_best"))
        lines.append(f"{kind}: {percent(validated[0])}, best {best}")
    evaluated = any("accuracy" in key and value is not None for key, value in summary.items() if key != "target_accuracy")
    if not evaluated:
        reason = summary.get("not_evaluated")
        lines.append("nothing was evaluated" + (f": {reason}" if reason else ""))
    elif summary.get("accuracy_final") is not None or not lines:  # some methods with personal models have no global one
        lines.append(
            f"accuracy: final {percent('accuracy_final')}, best {percent('accuracy_best')}, "
            f"mean of the best five {percent('accuracy_top5_mean')}"
        )
    if summary.get("select_on") == "validation" and summary.get("best_round") is not None:
        lines.append(f"best: round {summary['best_round']}, selected on validation data")
    for key in ("held_out_accuracy", "personal_held_out_accuracy_mean"):
        if summary.get(key) is not None:
            lines.append(f"on clients that never trained: {percent(key)}")
    if summary.get("personal_attackers_accuracy_mean") is not None:
        lines.append(f"attackers, which are in no number above: {percent('personal_attackers_accuracy_mean')}")
    if summary.get("evaluate_only") and evaluated:
        lines.append(f"evaluated the models of {summary['evaluate_only']} in {summary['seconds']:.1f} s")
    elif not summary.get("evaluate_only"):
        lines.append(
            f"{format_count(summary['rounds'], 'round')} in {summary['seconds']:.1f} s "
            f"({summary['seconds_per_round']:.3f} s a round), "
            f"{summary['bytes_up'] * mega:.1f} MiB up, {summary['bytes_down'] * mega:.1f} MiB down"
        )
    if (simulated := summary.get("simulated_time")) is not None:
        lost = f"{summary['lost_steps']} steps and {summary['lost_seconds']:.1f} s of local training were lost"
        lines.append(f"simulated time: {simulated:.1f} s; {lost}")
    if (target := summary.get("target_accuracy")) is not None:
        reached = "was not reached"
        if summary["rounds_to_target"] is not None:
            moved = (summary["bytes_up_to_target"] + summary["bytes_down_to_target"]) * mega
            reached = f"was reached after {format_count(summary['rounds_to_target'], 'round')} and {moved:.1f} MiB up and down"
            if (simulated := summary.get("simulated_time_to_target")) is not None:
                reached += f", in {simulated:.1f} simulated seconds"
        lines.append(f"target_accuracy={target:g} {reached}")
    if summary["failures"] or summary["replies_rejected"]:
        lines.append(f"failed clients: {summary['failures']}, rejected replies: {summary['replies_rejected']}")
    if "delta" in summary:
        spent = "no bound" if summary["epsilon"] is None else f"{summary['epsilon']:.3g}"
        condition = f", {summary['epsilon_condition']}" if "epsilon_condition" in summary else ""
        lines.append(f"privacy={summary['privacy']}: epsilon {spent} at delta {summary['delta']:g}{condition}")
    print("\n".join([*lines, f"everything is in {folder}"]), flush=True)
