"""A server on a real socket that answers what a test wants, and keeps what it was asked."""

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Scripted:
    """Answers every request with `answer(path)`: status, headers and body; `headers` has those of the `requests`."""

    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        self.headers: list[dict[str, str]] = []
        self.requests: list[BaseHTTPRequestHandler] = []
        self.answer: Callable[[str], tuple[int, dict[str, str], bytes]] = lambda path: (200, {}, b"{}")
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet: a delayed acknowledgement costs 40 ms

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                scripted.headers.append(dict(self.headers))
                scripted.requests.append(self)
                status, headers, body = scripted.answer(self.path)
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_HEAD = do_POST = do_DELETE = do_GET

            def log_message(self, *_: Any) -> None:
                """Tests have enough to read."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads = True

        self.server = Server((address, port), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
