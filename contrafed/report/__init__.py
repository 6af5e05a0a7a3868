"""What becomes of finished runs: tables beside the papers', figures, ``docs/RESULTS.md``."""
