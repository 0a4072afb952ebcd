"""A client that starts a kernel with jupyter_client, sends all cells of a file at once, as Run All does, and reads
until the kernel has ended.

    python client.py cells.json texts.json

Exits with the kernel's exit code; 99 where the kernel had to be killed.
"""

import json
import queue
import sys
import time
from pathlib import Path

from jupyter_client.manager import start_new_kernel


def main(cells: Path, texts: Path) -> int:
    manager, client = start_new_kernel(kernel_name="python3")
    output: list[str] = []
    try:
        for code in json.loads(cells.read_text()):
            client.execute(code)
        deadline, code = time.monotonic() + 90, None
        while time.monotonic() < deadline:
            try:
                message = client.get_iopub_msg(timeout=2)
            except queue.Empty:
                if code is not None:  # nothing is on its way any more
                    texts.write_text(json.dumps(output))
                    return code
                code = manager.provisioner.process.poll()
                continue
            content = message["content"]
            output += [content["text"]] if message["msg_type"] == "stream" else content.get("traceback", [])
        return 99
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
