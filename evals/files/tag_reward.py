def closed_and_right(completions, answer, **columns):
    """1.0 for the right number after the thinking, else 0.0."""
    scores = []
    for text, gold in zip(completions, answer, strict=True):
        thinking, tag, rest = text.rpartition("</think>")
        scores.append(1.0 if tag and rest.strip() == gold else 0.0)
    return scores
