"""A judge on a real socket for tests: an OpenAI-compatible endpoint that grades by a rule, and fails on demand."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "stand-in"
FAULTS = ("429", "500", "503", "silence", "slow bytes", "half an answer", "not JSON", "no verdict", "dropped", "empty")


def answers_in(request: str) -> list[str]:
    """The answers between the tags of a request by the kit's templates."""
    return [found.strip() for found in re.findall(r"<answer[^>]*>\n(.*?)\n</answer>", request, re.DOTALL)]


class JudgeServer:
    """Judges by `quality`, higher is better; `fault` names what goes wrong with a request (None: nothing).

    Attributes:
        fault: called with the number of the request, from 0, and the request's text; one of FAULTS or None.
        requests: bodies in the order of arrival. keys: the Authorization header of each. most: requests at a time.
        stall_s: how long a "silence" lasts.
    """

    def __init__(self, quality: Callable[[str], float], models: list[str] | None = None) -> None:
        self.quality, self.models = quality, [MODEL] if models is None else models
        self.fault: Callable[[int, str], str | None] = lambda number, text: None
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.stall_s, self.most, self._now, self._lock = 3.0, 0, 0, threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet: a delayed acknowledgement costs 40 ms

            def do_GET(self) -> None:
                self.send(200, json.dumps({"data": [{"id": name} for name in server.models]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if body["model"] not in server.models:
                    return self.send(404, json.dumps({"error": f"model {body['model']} not found"}))
                with server._lock:
                    number = len(server.requests)
                    server.requests.append(body)
                    server.keys.append(self.headers.get("Authorization"))
                    server._now += 1
                    server.most = max(server.most, server._now)
                try:
                    self.reply(server.fault(number, body["messages"][-1]["content"]), body)
                except OSError:
                    pass  # the client has given up
                finally:
                    with server._lock:
                        server._now -= 1

            def reply(self, fault: str | None, body: dict[str, Any]) -> None:
                request = body["messages"][-1]["content"]
                if fault == "silence":
                    time.sleep(server.stall_s)
                if fault in ("429", "500", "503", "400"):
                    said = f"cannot now, {self.headers.get('Authorization')}"  # as some servers echo the key
                    return self.send(int(fault), said, {"Retry-After": "0"} if fault == "429" else {})
                if fault == "dropped":
                    return self.connection.shutdown(socket.SHUT_RDWR)
                content = "Well, it depends." if fault == "no verdict" else server.verdict(request)
                content = "" if fault == "empty" else content
                whole = {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}]}
                text = json.dumps(whole | {"usage": {"total_tokens": 100}})
                text = "<html>Bad gateway</html>" if fault == "not JSON" else text
                if fault == "half an answer":
                    self.send(200, text[: len(text) // 2], {"Content-Length": str(len(text))})
                    return self.connection.shutdown(socket.SHUT_RDWR)
                if fault == "slow bytes":
                    self.head(200, {"Content-Length": str(len(text))})
                    for byte in text.encode():
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                        time.sleep(0.1)
                    return None
                return self.send(200, text)

            def head(self, status: int, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def send(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
                self.head(status, {"Content-Length": str(len(text.encode()))} | (headers or {}))
                self.wfile.write(text.encode())
                self.wfile.flush()

            def log_message(self, *_: Any) -> None:
                """Tests have enough to read."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """A client that has given up is no news."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def verdict(self, request: str) -> str:
        """The reply to a request of the kit's templates."""
        qualities = [self.quality(answer) for answer in answers_in(request)]
        if '"score"' in request:
            return f'It is fine. {{"score": {1 + 9 * qualities[0]:g}}}'
        order = sorted(range(len(qualities)), key=lambda i: -qualities[i])
        if '"ranking"' in request:
            return f'<think>{{"ranking": []}}</think>Here: {json.dumps({"ranking": [i + 1 for i in order]})}'
        return f'{{"better": {0 if qualities[0] == qualities[1] else order[0] + 1}}}'

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
