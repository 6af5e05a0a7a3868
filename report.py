"""Tables and figures of finished runs: ``python report.py DIR...``. An installed package has the command ``contrafed-report``."""

from contrafed.report_command import command

if __name__ == "__main__":
    command()
