"""What evaluations and reports show: intervals, samples, figures, the HTML page. Never torch."""
