"""A run's folder and its files. Never imports torch."""
