"""The driver's edge, faked: the calls of NVML's bindings that rloo_kit makes, over the GPUs in FAKE_GPUS (JSON).

    [{"name": ..., "capability": [8, 6], "total": bytes, "used": bytes, "uuid": "GPU-...", "mig": {"MIG-...": bytes},
      "processes": [[pid, "/usr/bin/program", bytes]]}]

Without FAKE_GPUS there is no driver, and FAKE_GPUS=broken is a driver that is there and fails.
"""

import json
import os
from types import SimpleNamespace


class NVMLError(Exception):
    pass


def _gpus():
    if os.environ["FAKE_GPUS"] == "broken":
        raise NVMLError("Unknown Error")
    return json.loads(os.environ["FAKE_GPUS"])


def nvmlInit():
    if "FAKE_GPUS" not in os.environ:
        raise NVMLError("NVML Shared Library Not Found")


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index):
    return {"index": index, **_gpus()[index]}


def nvmlDeviceGetHandleByUUID(uuid):
    for index, gpu in enumerate(_gpus()):
        if uuid in gpu.get("mig", {}):
            return {"parent": nvmlDeviceGetHandleByIndex(index), "total": gpu["mig"][uuid], "used": 0}
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


def nvmlDeviceGetTotalEnergyConsumption(handle):
    if "millijoules" not in handle:
        raise NVMLError("Not Supported")
    return handle["millijoules"]


def nvmlSystemGetDriverVersion():
    return "580.00"


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, _, used in handle.get("processes", [])]


def nvmlDeviceGetGraphicsRunningProcesses(handle):
    return []


def nvmlSystemGetProcessName(pid):
    for gpu in _gpus():
        for known, name, _ in gpu.get("processes", []):
            if known == pid and name:
                return name
    raise NVMLError("Not Found")
