"""The driver's edge, faked: the calls of NVML's bindings that rloo_kit makes, over the cards in FAKE_CARDS (JSON).

    [{"name": ..., "capability": [8, 6], "total": bytes, "used": bytes, "uuid": "GPU-...", "mig": {"MIG-...": bytes},
      "processes": [[pid, "/usr/bin/program", bytes]]}]

Without FAKE_CARDS there is no driver, and FAKE_CARDS=broken is a driver that is there and fails.
"""

import json
import os
from types import SimpleNamespace


class NVMLError(Exception):
    pass


def _cards():
    if os.environ["FAKE_CARDS"] == "broken":
        raise NVMLError("Unknown Error")
    return json.loads(os.environ["FAKE_CARDS"])


def nvmlInit():
    if "FAKE_CARDS" not in os.environ:
        raise NVMLError("NVML Shared Library Not Found")


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(_cards())


def nvmlDeviceGetHandleByIndex(index):
    return {"index": index, **_cards()[index]}


def nvmlDeviceGetHandleByUUID(uuid):
    for index, card in enumerate(_cards()):
        if uuid in card.get("mig", {}):
            return {"parent": nvmlDeviceGetHandleByIndex(index), "total": card["mig"][uuid], "used": 0}
    raise NVMLError("Not Found")


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    if "parent" not in handle:
        raise NVMLError("Invalid Argument")
    return handle["parent"]


def nvmlDeviceGetIndex(handle):
    return handle["index"]


def nvmlDeviceGetUUID(handle):
    return handle["uuid"]


def nvmlDeviceGetName(handle):
    return handle["name"]


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=handle["total"], used=handle["used"], free=handle["total"] - handle["used"])


def nvmlDeviceGetCudaComputeCapability(handle):
    return tuple(handle["capability"])


def nvmlSystemGetDriverVersion():
    return "580.00"


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, _, used in handle.get("processes", [])]


def nvmlDeviceGetGraphicsRunningProcesses(handle):
    return []


def nvmlSystemGetProcessName(pid):
    for card in _cards():
        for known, name, _ in card.get("processes", []):
            if known == pid and name:
                return name
    raise NVMLError("Not Found")
