"""The checks and measurements of `benchmarks/first_hour.py`, each a function of a `Bench`."""
