"""A hub on this machine, with as much of its API as the hub's own client uses to create a repository and upload a
folder: what it is sent, it keeps."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """Attributes: url; token, the one that may write; created, repositories; files, name to content; requests."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.created: list[str] = []
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self._large: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                hub.requests.append(f"GET {self.path}")
                is_known = self.headers.get("authorization") == f"Bearer {hub.token}"
                found = {"id": "someone/sums", "sha": "0" * 40, "siblings": []}
                self.reply(found if is_known else {"error": "Invalid user token."}, 200 if is_known else 401)

            def do_PUT(self) -> None:
                hub._large[self.path.rsplit("/", 1)[1]] = self.read()
                self.reply({})

            def do_POST(self) -> None:
                hub.requests.append(f"POST {self.path}")
                body = self.read()
                if self.headers.get("authorization") != f"Bearer {hub.token}":
                    self.reply({"error": "Invalid user token."}, 401)
                elif self.path == "/api/repos/create":
                    asked = json.loads(body)
                    name = f"{asked['organization']}/{asked['name']}"
                    hub.created.append(name)
                    self.reply({"url": f"{hub.url}/{name}"})
                elif "/preupload/" in self.path:
                    modes = [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular",
                            "shouldIgnore": False,
                        }
                        for file in json.loads(body)["files"]
                    ]
                    self.reply({"files": modes})
                elif self.path.endswith("/info/lfs/objects/batch"):
                    objects = [
                        one | {"actions": {"upload": {"href": f"{hub.url}/store/{one['oid']}"}}}
                        for one in json.loads(body)["objects"]
                    ]
                    self.reply({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")
                elif "/commit/" in self.path:
                    for line in body.splitlines():
                        entry = json.loads(line)
                        value = entry["value"]
                        if entry["key"] == "file":
                            hub.files[value["path"]] = base64.b64decode(value["content"])
                        elif entry["key"] == "lfsFile":
                            content = hub._large[value["oid"]]
                            assert hashlib.sha256(content).hexdigest() == value["oid"]
                            hub.files[value["path"]] = content
                    self.reply(
                        {
                            "commitUrl": f"{hub.url}/someone/sums/commit/{'1' * 40}",
                            "commitOid": "1" * 40,
                            "success": True,
                        }
                    )
                else:
                    self.reply({"success": True})

            def read(self) -> bytes:
                if self.headers.get("transfer-encoding") == "chunked":
                    found = b""
                    while size := int(self.rfile.readline(), 16):
                        found += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                    return found
                return self.rfile.read(int(self.headers.get("content-length") or 0))

            def reply(self, value: Any, status: int = 200, kind: str = "application/json") -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
