"""Sizes in bytes as people write them: "141GiB" in, "141.0 GiB" out. Binary and decimal units both, never guessed."""

from __future__ import annotations

import re

from twinfer.errors import LimitError

_SCALE = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SCALE[f"{_letter}ib"] = 1024**_power
    _SCALE[f"{_letter}b"] = 1000**_power


def parse_bytes(text: str) -> int:
    """Bytes of "141GiB", "80 GB", "1.5GiB" or "4096". Raises LimitError naming the text (a lone "G" is refused: it might mean either)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    scale = _SCALE.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise LimitError(f"{text!r} is not a size; write for instance 141GiB, 80GB or 4096 (units: B, KiB, MiB, GiB, TiB, KB, MB, GB, TB)")
    size = int(float(match[1]) * scale) if "." in match[1] else int(match[1]) * scale
    if not 0 < size < 2**63:
        raise LimitError(f"{text!r} must be above 0 and below 8 EiB")
    return size


def format_bytes(size: int) -> str:
    """`size` with one decimal in the largest binary unit that leaves at least 1: "141.0 GiB", "512 B"."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    for unit in units:
        if abs(value) < 1024 or unit == units[-1]:
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
