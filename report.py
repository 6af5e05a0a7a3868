"""Tables and figures of finished runs: ``python report.py DIR...``. Installed, it is the command ``contrafed-report``."""

from contrafed.report_command import command

if __name__ == "__main__":
    command()
