"""How much memory is left, so that work that cannot fit is refused before it starts."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

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
        raise MemoryError(f"{what} needs about {_size(needed)}, and {_size(free)} are free; {remedy}")


def check_arrays(path: Path) -> None:
    """Raise MemoryError if the arrays of an .npz or .npy file cannot fit, by what its headers say, before reading any.

    Counted are the arrays and a copy of them as floating-point numbers. What is no such file is left to its reader.
    """
    if path.is_file():
        needed = sum(_stored(path))
        check_memory(needed, f"reading the arrays of {path.name!r}", "keep fewer layers or a shorter input in the file")


def check_pixels(height: int, width: int) -> None:
    """Raise MemoryError if an image of this size cannot be made ready for a model."""
    # The picture, its pixels as float32, and twice as float64 on the way to mean and deviation; each of 3 channels.
    needed = height * width * 3 * (1 + 4 + 8 + 8 + 4)
    check_memory(needed, f"an image of {height:,} x {width:,} pixels", "give a smaller size")


def _stored(path: Path) -> Iterator[int]:
    """For each array in an .npz or .npy file the bytes of it and of its copy; none behind what cannot be read."""
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                yield _array_bytes(file)
            return
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                with archive.open(member) as file:
                    yield _array_bytes(file) if member.filename.endswith(".npy") else member.file_size
    except Exception:  # whatever is wrong with the file, its reader will say
        return


def _array_bytes(file: IO[bytes]) -> int:
    from numpy.lib import format as npy

    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return math.prod(shape) * (dtype.itemsize + (dtype.itemsize if dtype.kind in "fcSU" else 8))


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count < 10**18 else "more than a billion GB"
