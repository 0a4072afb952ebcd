"""Batches of papermill runs: the file, the runner, status, comparison."""
