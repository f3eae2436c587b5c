"""`twinfer env`: what a bug report needs, on one screen. It measures nothing and changes nothing."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import twinfer
from twinfer.config import ModelConfig
from twinfer.count import Count
from twinfer.serve import options as o
from twinfer.serve.backend import NO_TRITON, has_triton, why_not_fast
from twinfer.serve.model import CHOICES, bundled

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "typer", "rich")


def env(as_json: o.JsonOption = False) -> None:
    """Versions, devices, and whether the fast engine can run, for bug reports.

    No model is loaded and nothing is measured. TWINFER_ variables that are set
    are listed with their values.

    Examples:

      $ twinfer env
      $ twinfer env --json
    """
    found = _environment()
    if as_json:
        print(json.dumps(found))
        return
    width = max(len(name) for name in found)
    for name, value in found.items():
        print(f"{name:<{width}}  {', '.join(value) if isinstance(value, list) else value}")


def _environment() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {
        "twinfer": f"{twinfer.__version__} ({Path(twinfer.__file__).parent})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["bundled models"] = CHOICES
    found["devices"] = _devices()
    found["fast engine"] = _fast()
    # Settings that change what an engine does; their values can't be secrets, as each names a limit or a switch of twinfer.
    found["settings"] = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("TWINFER_"))
    return found


def _fast() -> str:
    """Where the fast engine can run here, or why it can't."""
    if not has_triton():
        return f"can't run: {NO_TRITON}"
    try:
        import torch
    except ImportError as error:
        return f"can't run: torch can't be imported: {error}"
    config = ModelConfig.from_file(bundled("micro").path)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    reasons = {device: why_not_fast(config, device, "float32") for device in dict.fromkeys((kind, "cpu"))}
    if not reasons[kind] and kind == "cuda":
        return "can run on cuda"
    if not reasons["cpu"]:
        return "can run on cpu, in Triton's interpreter (TRITON_INTERPRET is set): slow, for tests of small models"
    return f"can't run: {reasons[kind]}"


def _devices() -> list[str]:
    try:
        import torch
    except ImportError as error:
        return [f"torch can't be imported: {error}"]
    devices = [f"cpu ({Count(torch.get_num_threads(), 'thread')})"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.1f} GiB, sm_{properties.major}{properties.minor}, "
                f"CUDA {torch.version.cuda}"
            )
    return devices
