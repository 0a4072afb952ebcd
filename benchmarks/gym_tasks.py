"""Which verifiers of the reasoning-gym library are sound; figures go to `results/gym_tasks.json`.

    python benchmarks/gym_tasks.py

For each task, some rows are drawn as a run draws them, stored as JSON, read back and scored: the stored answer must
score 1, every text of eleven kinds of nonsense 0, nothing may raise, and no answer may be run as Python. Nonsense never
equals or contains the stored answer: some verifiers give len(stored) / len(given) to a text that does.
Each task runs in a separate process. The findings are compared with `rloo_kit/data/gym_tasks.py`; --write-table writes
them there and into docs/data.md.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reporting

RESULT = reporting.RESULTS / "gym_tasks.json"
ROWS, START = 60, 2**30
DRAWN, DRAWN_S = 1500, 4.0  # more rows that are only drawn: some tasks raise once in hundreds
SLOW_S = 0.15  # per row: two thousand take five minutes
TASK_LIMIT_S = 120.0
WORDS = ("purple giraffe beneath quiet thunder", "slowly mumbling jelly", "qwx vbn hjk", "#~#~#")
NUMBERS = ("7310055", "4446644", "99", "28", "135790864200", "55555")
CONSTANTS = (
    "nan", "inf", "-inf", "0", "1", "-1", "2", "10", "100", "0.0", "0.5", "1/2", "0:00", "00:00:00", "[]", "[[]]", "{}",
    "()", "''", '""', "None", "null", "true", "false", "yes", "no", "A", "a", ".", "-", "x", "0 0", "[0]", "unknown",
)  # fmt: skip


def nonsense(question: str, answer: str) -> Iterator[tuple[str, str]]:
    """Texts of eleven kinds that answer nothing, with the kind; none is or contains the stored answer.

    Raises ValueError if a kind has no text left.
    """
    without = question
    while is_answer(without, answer):
        without = re.sub(r"\s*".join(map(re.escape, "".join(answer.split()))), "", without, flags=re.IGNORECASE)
    texts = {
        "empty": ("",),
        "white space": ("  \n\t ",),
        "random words": WORDS,
        "a number": NUMBERS,
        "a negative number": [f"-{number}.{part}" for number in NUMBERS for part in ("25", "6")],
        "a constant": CONSTANTS,
        "open brackets": ('{"a": [[], {"b"', "[[{((", "[", "<"),
        "a very long text": [f"{words} " * 800 for words in WORDS],
        "other scripts": ("\u3042\u0645 \U0001f642 \u00e9\ufffd \ufdfd", "\u05d0"),
        "the question": (without, without.replace(" ", "")),
        "broken LaTeX": ("\\boxed{{\\frac{}$", "\\boxed{", "$"),
    }
    for kind, given in texts.items():
        found = [text for text in given if not is_answer(text, answer)]
        if not found:
            raise ValueError(f"no text of the kind '{kind}' is free of the answer {answer!r}")
        yield from ((kind, text) for text in found)


def is_answer(text: str, answer: str) -> bool:
    """Whether a text contains the stored answer, or is the same number."""
    if "".join(answer.lower().split()) in "".join(text.lower().split()):
        return True
    try:
        return float(text) == float(answer)
    except ValueError:
        return False


def runs_python(verifier: Any, entry: dict[str, Any]) -> bool:
    """Whether the verifier runs an answer as Python: each probe creates a file, in a form that verifiers may expect."""
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "made")
        code = f"open('{made}', 'w')"
        system = f"__import__('os').system('touch {made}')"
        forms = "{}", "[{}]", "[[{}]]", "{{0: {}}}", "str({})", "1 + {}"
        for text in [form.format(made_by) for made_by in (code, system) for form in forms]:
            with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stderr(io.StringIO()):
                verifier.score_answer(text, entry)
            if os.path.exists(made):
                return True
    return False


def measure(task: str, rows: int, most_drawn: int = DRAWN, level: int | None = None) -> dict[str, Any]:
    """What the task's verifier does on `rows` rows; up to `most_drawn` are drawn."""
    from rloo_kit.data.gym_library import draw, make_dataset

    started = time.process_time()
    entries = draw(task, {}, level, START, rows, "data.options", judged=False)["entries"]
    drawn_s = (time.process_time() - started) / len(entries)
    verifier = make_dataset(task, {}, level, seed=0, size=1)
    if any(runs_python(verifier, entry) for entry in entries[:5]):
        return {"rows": len(entries), "runs_python": True}
    more = draw(
        task, {}, level, START, int(max(min(most_drawn, DRAWN_S / drawn_s), rows)), "data.options", judged=False
    )
    gold, given, raised, calls = [], {}, {}, 0
    started = time.process_time()
    for entry in entries:
        answer = entry["answer"].strip()
        for kind, text in [("the stored answer", answer), *nonsense(entry["question"], answer)]:
            calls += 1
            try:
                value = float(verifier.score_answer(text, entry))
            except (Exception, SystemExit) as error:
                raised[kind] = f"{type(error).__name__}: {error}"[:200]
                continue
            if kind == "the stored answer":
                gold.append(value)
            elif value and value > given.get(kind, ("", 0.0))[1]:
                given[kind] = text[:40], value
    sentence = f"It is {entries[0]['answer'].strip()}, I think."
    return {
        "rows": len(entries), "runs_python": False, "drawn": more["drawn"], "late": more["late"],
        "gold": min(gold, default=None), "nonsense": given, "raised": raised,
        "in_a_sentence": float(verifier.score_answer(sentence, entries[0])) if not raised else None,
        "draw_s": drawn_s, "score_s": (time.process_time() - started) / calls,
    }  # fmt: skip


def why_refused(row: dict[str, Any]) -> str:
    """Why a task is not offered; empty if it is."""
    if "error" in row:
        return row["error"]
    if row["runs_python"]:
        return "its verifier runs the answer as Python"
    if row["raised"]:
        kind, error = next(iter(row["raised"].items()))
        return f"its verifier raises {error.partition(':')[0]} on {kind}"
    if row["gold"] != 1:
        return f"its stored answer scores {row['gold']:.2g}"
    if row["nonsense"]:
        kind, (text, value) = max(row["nonsense"].items(), key=lambda pair: pair[1][1])
        return f"its verifier gives {value:.2g} to nonsense ({kind}{f': `{text}`' if kind == 'a constant' else ''})"
    return f"too slow to draw ({row['draw_s']:.2g} s a row)" if row["draw_s"] > SLOW_S else ""


def measure_apart(task: str, rows: int, most_drawn: int = DRAWN) -> dict[str, Any]:
    """`measure` in a separate process, which may hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        from rloo_kit.errors import DataError

        os.chdir(folder)  # codeio runs programs that write files
        try:
            sender.send(measure(task, rows, most_drawn))
        except DataError as error:
            found = re.search(
                r"cannot be drawn: .\w+: (.*?).\. Change|refuses \{\} \(\w+: (.*?)\)|(took more than .*?) with",
                str(error),
            )
            sender.send({"error": next(filter(None, found.groups())) if found else str(error)})

    folder = tempfile.mkdtemp()
    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(TASK_LIMIT_S) else {"error": f"took over {TASK_LIMIT_S:g} s"}
    except EOFError:
        return {"error": "its process died"}
    finally:
        process.kill()
        process.join()
        shutil.rmtree(folder, ignore_errors=True)


def list_tasks() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results, and report differences from the kit's list."""
    reporting.settle()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--only", nargs="*", help="tasks; all of them")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--write-table", action="store_true", help="from --out, without measuring")
    options = parser.parse_args(arguments)
    if options.write_table:
        write_tables(json.loads(options.out.read_text(encoding="utf-8"))["tasks"])
        return 0
    from rloo_kit.data.gym_tasks import REFUSED

    found, different = [], []
    for task in options.only or list_tasks():
        row = {"task": task, **measure_apart(task, options.rows)}
        row["refused"] = why_refused(row)
        print(f"{task}: {row['refused'] or 'sound'}", flush=True)
        found.append(row)
        if bool(row["refused"]) != (task in REFUSED):
            different.append(task)
    from importlib.metadata import version

    head = reporting.header("benchmarks/gym_tasks.py") | {"reasoning_gym": version("reasoning-gym")}
    sound = sum(not row["refused"] for row in found)
    reporting.write(head | {"sound": sound, "refused": len(found) - sound, "tasks": found}, options.out)
    if different:
        print(f"differs from rloo_kit/data/gym_tasks.py: {', '.join(different)}")
    return 1 if different else 0


def write_tables(rows: list[dict[str, Any]]) -> None:
    """The lists of `rloo_kit/data/gym_tasks.py` and the table of docs/data.md."""
    sound = "".join(f'    "{row["task"]}",\n' for row in rows if not row["refused"])
    refused = [row for row in rows if row["refused"]]
    reasons = "".join(f"    {json.dumps(row['task'])}: {json.dumps(row['refused'])},\n" for row in refused)
    lines = [[f"`{row['task']}`", row["refused"]] for row in refused]
    listed = {
        reporting.ROOT / "rloo_kit/data/gym_tasks.py": (
            "# begin: written by benchmarks/gym_tasks.py --write-table\n",
            "# end\n",
            f"SOUND: tuple[str, ...] = (\n{sound})\nREFUSED: dict[str, str] = {{\n{reasons}}}\n",
        ),
        reporting.ROOT / "docs/data.md": (
            "<!-- gym tasks -->\n\n",
            "<!-- end -->\n",
            "\n".join([*reporting.table(["refused", "why"], lines), "", ""]),
        ),
    }
    for path, (begin, end, text) in listed.items():
        before, _, rest = path.read_text(encoding="utf-8").partition(begin)
        path.write_text(before + begin + text + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
