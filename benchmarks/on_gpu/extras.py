"""Checks outside the hour (part 0), run by `first_hour.py --only NAME`."""
