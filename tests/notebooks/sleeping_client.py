"""A client that sends its cells at once and may then be stopped; it reads what is left when the kernel has ended.

Prints `sent`, and in the end how many x and y came and the kernel's exit code.
"""

import queue
import sys
import time

from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3")
for cell in sys.argv[1:]:
    client.execute(cell)
print("sent", flush=True)
kernel = manager.provisioner.process
deadline = time.monotonic() + 60
while kernel.poll() is None and time.monotonic() < deadline:
    time.sleep(0.1)
output = ""
try:
    while True:
        message = client.get_iopub_msg(timeout=2)
        output += message["content"]["text"] if message["msg_type"] == "stream" else ""
except queue.Empty:
    pass
code = kernel.poll()
client.stop_channels()
manager.shutdown_kernel(now=True)
output = output.partition("memory held")[0]  # the shutdown's own words have letters too
print(output.count("x"), output.count("y"), code)
