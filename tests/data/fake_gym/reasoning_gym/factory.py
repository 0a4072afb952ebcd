"""One task, whose rows and verifier do to their process what the options and the answer say."""

import os
import sys
import time
from dataclasses import dataclass

if "RLOO_KIT_BROKEN_GYM" in os.environ:
    raise ImportError("libgym.so is missing")


@dataclass
class Config:
    seed: int = 0
    size: int = 1
    build_s: float = 0.0
    memory: int = 0
    hang_at: int = -1  # the row
    die_at: int = -1


class Dataset:
    """Row 5 has no answer, and row 6 one that the verifier does not accept."""

    def __init__(self, config):
        time.sleep(config.build_s)
        bytearray(config.memory)
        self.config = config

    def __getitem__(self, index):
        if index == self.config.hang_at:
            time.sleep(600)
        if index == self.config.die_at:
            os._exit(3)
        number = self.config.seed + index
        answer = {5: " ", 6: "wrong"}.get(index, str(number + 1))
        return {"question": f"{number} + 1 =", "answer": answer, "metadata": {"index": index}}

    def score_answer(self, given, entry):
        if given == "raise":
            raise KeyError(given)
        if given == "interrupt":
            raise KeyboardInterrupt
        if given == "exit()":
            sys.exit()
        if given == "die":
            os._exit(3)
        if given == "hang":
            time.sleep(600)
        return float(given == entry["answer"] != "wrong")


DATASETS = {"chain_sum": (Dataset, Config)}
