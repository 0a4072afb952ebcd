"""The reward of smollm2_sums.yaml: the last number of the completion decides, wherever it stands in the sentence."""


def last_number(completions, answer):
    """1.0 where the last number of the text is the answer ("17 + 9 equals 26."), else 0.0."""
    texts = ("".join(one if one.isdigit() else " " for one in text).split() for text in completions)
    return [float(numbers[-1:] == [str(gold)]) for numbers, gold in zip(texts, answer, strict=True)]
