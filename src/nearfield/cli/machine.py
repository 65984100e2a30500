"""Facts about this machine and the versions that run on it: what a figure means nothing without."""

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import nearfield

_OPTIONAL = ("triton", "diffusers", "transformers", "nearfield-lab")


def facts() -> dict[str, Any]:
    """Everything a reader needs to judge a figure, in plain values."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "gpus": gpus(),
        "load": load(),
    }


def load() -> float | None:
    """Processes that want to run, averaged over the last minute; None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str | None]:
    """Installed versions; None for what is not installed. Reads metadata, imports nothing."""
    found: dict[str, str | None] = {
        "nearfield": nearfield.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(),
    }
    return found | {name: _installed(name) for name in _OPTIONAL}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cudnn_version() -> str | None:
    number = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    if number is None:
        return None
    # 91900 is 9.19.0; before version 9 the major number stood one digit lower.
    major = 10000 if number >= 90000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def gpus() -> list[dict[str, Any]]:
    """Name, capability, memory and driver of every visible CUDA device."""
    if not torch.cuda.is_available():
        return []
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
                "driver": driver.splitlines()[0] if driver else None,
            }
        )
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The git commit of the checkout this package runs from, "+" if changed since; None outside a checkout."""
    package = Path(nearfield.__file__).resolve().parent
    top = output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() / "src" / "nearfield" != package:
        return None
    head = output("git", "-C", top, "rev-parse", "--short=12", "HEAD")
    changed = output("git", "-C", top, "status", "--porcelain", "--untracked-files=no")
    return head + ("+" if changed else "") if head else None


def output(*command: str) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
