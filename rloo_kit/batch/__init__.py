"""Batches of notebook runs through papermill: the file, the runner, status, comparison."""
