"""What a run shows and leaves. Importing this is cheap: plotting and logging libraries load when they are used."""

from contrafed.reporting.console import Progress, print_summary, quiet_libraries
from contrafed.reporting.folder import alone, claim_folder
from contrafed.reporting.recorder import LOGS, RunRecorder, versions
from contrafed.reporting.rounds import RoundLog, shown

__all__ = [
    "LOGS",
    "Progress",
    "RoundLog",
    "RunRecorder",
    "alone",
    "claim_folder",
    "print_summary",
    "quiet_libraries",
    "shown",
    "versions",
]
