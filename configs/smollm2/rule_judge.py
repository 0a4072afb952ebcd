"""A judge by a rule, to try `judge_reward` and `eval.judge` without a service: python configs/smollm2/rule_judge.py

It answers as an OpenAI-compatible endpoint. A rewrite is good if it keeps who did what to which thing and where (the
names in the task's sentence), and worse for every word beyond ten. A real judge is a language model; this one is quick,
and knows the truth.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FACTS = re.compile(r", (\w+), who .*?, (\w+) an old (\w+) at the (\w+),")


def grade(task: str, answer: str) -> float:
    """0 to 1: the share of the facts that the answer keeps, less 0.05 for each word beyond ten; 0 for other tasks."""
    found, words = FACTS.search(task), re.findall(r"\w+", answer)
    if found is None:
        return 0.0
    facts = found.groups()
    return max(0.0, sum(fact in words for fact in facts) / len(facts) - 0.05 * max(0, len(words) - 10))


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_GET(self):
        self.send({"data": [{"id": "rule"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        task = re.search(r"<task>\n(.*?)\n</task>", request, re.DOTALL)[1]
        grades = [grade(task, one) for one in re.findall(r"<answer[^>]*>\n(.*?)\n</answer>", request, re.DOTALL)]
        order = sorted(range(len(grades)), key=lambda i: -grades[i])
        verdict = {"better": 0 if max(grades) == min(grades) else order[0] + 1}
        if '"score"' in request:
            verdict = {"score": 1 + 9 * grades[0]}
        elif '"ranking"' in request:
            verdict = {"ranking": [i + 1 for i in order]}
        self.send({"choices": [{"message": {"content": json.dumps(verdict)}}], "usage": {"total_tokens": 300}})

    def send(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8500
    print(f"a judge by a rule at http://127.0.0.1:{port}/v1", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Judge).serve_forever()
