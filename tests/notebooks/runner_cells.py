"""The notebook that every runner has to survive, and what its output has to be.

Plain code without torch: a kernel starts in a second, and what is tested is the end of it.
"""

import re

LINES = 4000
DIGITS = "0123456789" * 3_000_000  # 30 MB
HELD_GIB = 0.1  # of the 0.125 below
SAVED_BYTES = 15 * 2**20

START = """
import os, sys
import rloo_kit as kit
print("pid", os.getpid())

def fails():
    held = [bytearray(4096) for _ in range(32_768)]  # 128 MiB, in the frame of the last error
    raise RuntimeError("the last error")

try:
    fails()
except RuntimeError as error:
    sys.last_value = error
    if sys.version_info >= (3, 12):
        sys.last_exc = error
"""
# Not flushed one by one: ZeroMQ drops messages of a kernel that is some 2,000 ahead of its client, shutdown or not.
PRINT = f"""
for number in range({LINES}):
    print(f"line {{number}}")
"""
BIG = 'print("<" + "0123456789" * 3_000_000 + ">")'
SAVE = f"""
import threading, time
from rloo_kit.runs.files import saving

def save():
    with saving("slow.bin"), open("slow.bin", "wb") as file:
        for _ in range(15):
            file.write(bytes({SAVED_BYTES // 15}))
            file.flush()
            time.sleep(0.1)

threading.Thread(target=save, daemon=True).start()
while not os.path.exists("slow.bin"):
    time.sleep(0.01)
"""
SHUT_DOWN = "kit.shutdown_kernel()"

CASES = {
    "last": [START, PRINT, BIG, SHUT_DOWN],
    "middle and twice": [START, SHUT_DOWN, 'print("still runs")', PRINT, BIG, SAVE, SHUT_DOWN, SHUT_DOWN],
}


def kernel_pid(text: str) -> int:
    """The process that ran the cells, as it said itself."""
    return int(re.search(r"^pid (\d+)$", text, re.MULTILINE).group(1))


def outputs_complete(case: str, text: str) -> bool:
    """Whether every line is there, in order, and the large output to its last byte, and what comes after it."""
    lines = re.findall(r"^line \d+$", text, re.MULTILINE)
    begin, end = text.find("<") + 1, text.find(">")
    calls = CASES[case].count(SHUT_DOWN)
    return (
        lines == [f"line {number}" for number in range(LINES)]
        and text[begin:end] == DIGITS
        and ("still runs" in text) == (case != "last")
        and len(_figures(text)) == calls
    )


def memory_released(text: str) -> bool:
    """Whether the first call gave back what the last error held; the kernel's own line says so."""
    before, after = next(iter(_figures(text)), (0.0, 0.0))
    return before - after >= HELD_GIB


def _figures(text: str) -> list[tuple[float, float]]:
    found = re.findall(r"memory held by this process: ([\d.]+) GiB before, ([\d.]+) after", text)
    return [(float(before), float(after)) for before, after in found]
