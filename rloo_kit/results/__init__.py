"""Evaluations, intervals, comparisons, verdicts and the HTML report. Never imports torch."""
