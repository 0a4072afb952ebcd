"""Notebook surface: parameters, kernel shutdown, display."""
