"""The rule behind topic_preferences.jsonl: an answer names what was asked about, as in the question."""


def names_topic(completions, topic, **_):
    """1.0 if the completion has the words of the column `topic`."""
    return [float(words in text.lower()) for text, words in zip(completions, topic, strict=True)]
