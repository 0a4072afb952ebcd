"""What needs no model: faults of a run, the result of a preflight, and the files that `init` writes."""
