"""Report finished runs: tables with the papers' values, figures, ``docs/RESULTS.md``."""
