"""How much memory is left, so that work that cannot fit is refused before it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def free_memory(device: torch.device | None = None) -> int | None:
    """Bytes that can be had on a device: of a GPU, or without swapping and within the limit of a container.

    None where nobody says.
    """
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    found = list[int]()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    try:
        folder = Path("/sys/fs/cgroup")
        limit, used = ((folder / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        found.append(int(limit) - int(used))
    except (OSError, ValueError):
        pass  # no container, or one without a limit ("max")
    if not found and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def check_memory(needed: int, what: str, remedy: str, device: torch.device | None = None) -> None:
    """Raise MemoryError, with both numbers and the remedy, if `needed` bytes are more than can be had."""
    free = free_memory(device)
    if free is not None and needed > free:
        raise MemoryError(f"{what} needs about {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free; {remedy}")
