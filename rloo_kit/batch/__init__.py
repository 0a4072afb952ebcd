"""Batches of notebook runs: their file, and what runs them. It loads no heavy library."""
