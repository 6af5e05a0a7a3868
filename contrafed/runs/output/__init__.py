"""Show a run and write its files. This import is cheap: plotting and logging libraries are loaded when they are used."""

from contrafed.runs.output.console import Progress, print_summary, quiet_libraries
from contrafed.runs.output.folder import alone, claim_folder
from contrafed.runs.output.recorder import LOGS, RunRecorder, versions
from contrafed.runs.output.rounds import RoundLog, select_shown_scores

__all__ = [
    "LOGS",
    "Progress",
    "RoundLog",
    "RunRecorder",
    "alone",
    "claim_folder",
    "print_summary",
    "quiet_libraries",
    "select_shown_scores",
    "versions",
]
