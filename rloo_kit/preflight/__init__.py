"""Faults of a run that can be found before its model is loaded."""
