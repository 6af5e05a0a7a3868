"""What a run shows and leaves. Importing this is cheap: plotting and logging libraries load when they are used."""

from contrafed.reporting.console import Progress, print_summary, quiet_libraries
from contrafed.reporting.folder import claim_folder, give_up_folder
from contrafed.reporting.recorder import LOGS, RunRecorder, versions
from contrafed.reporting.rounds import RoundLog, shown

__all__ = [
    "LOGS",
    "Progress",
    "RoundLog",
    "RunRecorder",
    "claim_folder",
    "give_up_folder",
    "print_summary",
    "quiet_libraries",
    "shown",
    "versions",
]
