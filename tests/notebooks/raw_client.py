"""A program that starts a kernel with jupyter_client, runs the cells of a file, and waits for the kernel's own end.

    python raw_client.py cells.json texts.json

Exits with the kernel's exit code; 99 where the kernel had to be killed.
"""

import json
import sys
import time
from pathlib import Path

from jupyter_client.manager import start_new_kernel


def main(cells: Path, texts: Path) -> int:
    manager, client = start_new_kernel(kernel_name="python3")
    output: list[str] = []

    def keep(message: dict) -> None:
        if message["msg_type"] == "stream":
            output.append(message["content"]["text"])
        elif message["msg_type"] == "error":
            output.append("\n".join(message["content"]["traceback"]))

    try:
        for code in json.loads(cells.read_text()):
            client.execute_interactive(code, output_hook=keep, timeout=90)
        texts.write_text(json.dumps(output))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            code = manager.provisioner.process.poll()
            if code is not None:
                return code
            time.sleep(0.1)
        return 99
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
