"""Measurements: one table of cases, one runner, one report. `python -m benchmarks` lists them."""
