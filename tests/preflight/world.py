"""Tools for a preflight."""


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: which one.
    """
    return {"one": "eins"}[word]


class World:
    """Counts down from the answer."""

    def reset(self, answer: str, **row: object) -> None:
        self.left = int(answer)

    def take(self, a: int) -> int:
        """Take something away.

        Args:
            a: how much.
        """
        self.left -= a
        return self.left

    def get_reward(self) -> float:
        return float(self.left == 0)


class Quiz:
    """Answers without tools."""

    def reset(self, answer: str, **row: object) -> None:
        self.asked = False

    def respond(self, messages: list) -> list:
        replies = [] if self.asked else [{"role": "user", "content": "Sure?"}]
        self.asked = True
        return replies
