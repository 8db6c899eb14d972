"""Files: what may be written where, writing that is whole or not at all, and values as JSON takes them."""

from __future__ import annotations

import io
import json
import math
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from numbers import Complex, Integral, Real
from pathlib import Path
from typing import IO, Any

# Less room than this on a disk holds no answer.
_LEAST_ROOM = 4096
_ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_SURROGATES = re.compile("[\ud800-\udfff]")


def named(path: str | os.PathLike[str]) -> str:
    r"""The path as messages name it: as it is, or quoted with escapes (\n, \x1b) where a terminal would obey it."""
    text = os.fspath(path)
    return text if text.isprintable() else repr(text)


def destination(path: str | os.PathLike[str]) -> Path:
    """The file that a write to `path` would make or replace, behind all links.

    Raises FileNotFoundError where its folder is missing, PermissionError where the file or its folder must not be
    written, and OSError for what is no file to replace: a folder, a file with a second name (a hard link), a disk
    without room. A FIFO and a device such as a terminal are fine: they are written to, not replaced.
    """
    path, name = Path(path), named(path)
    try:
        real = Path(os.path.realpath(path))
        folder = real.parent if path.is_symlink() else path.parent
        if not folder.is_dir():
            raise FileNotFoundError(f"cannot write {name}: the folder {named(folder)} does not exist")
        found = real.stat() if os.path.lexists(real) else None
        room = shutil.disk_usage(folder).free
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise OSError(f"cannot write {name}: {_reason(error)}") from error
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"cannot write {name}: it is a folder; give the name of a file")
    if found is not None and (not found.st_mode & 0o222 or not os.access(real, os.W_OK)):
        raise PermissionError(f"cannot write {name}: it is read-only; make it writable, or give another file")
    if found is not None and _takes_a_stream(found.st_mode):
        return real
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise OSError(f"cannot write {name}: it is no file, but a socket or a disk; give another file")
    if found is not None and found.st_nlink > 1:
        raise OSError(
            f"cannot write {name}: the file has {found.st_nlink} names (hard links), and replacing it would part "
            "them; give another file, or delete this name first"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write {name}: the folder {named(folder)} may not be written to")
    if room < _LEAST_ROOM:
        raise OSError(f"cannot write {name}: its disk is full; make room, or write elsewhere")
    return real


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> Path:
    """Write a file whole or not at all: into memory, then into a new file beside it, renamed over it.

    A link stays a link, and a file that is replaced keeps its permissions.

    Raises what `destination` does; OSError, with the reason, where the disk refuses.
    """
    real, content = destination(path), io.BytesIO()
    write(content)
    try:
        if real.exists() and _takes_a_stream(real.stat().st_mode):
            with open(real, "wb") as stream:
                stream.write(content.getbuffer())
        else:
            _replace(real, content)
    except OSError as error:
        raise OSError(f"cannot write {named(path)}: {_reason(error)}") from error
    return path


def locked(file: IO[bytes] | int, *, shared: bool = False) -> bool:
    """Whether no other run has the file or folder, which is locked then.

    shared: others that share it may have it too. Without locks (Windows, some network drives) none has. The lock ends
    with the process that holds it.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def plain(value: Any) -> Any:
    """The value as JSON takes it: numbers and arrays of numpy and torch as Python's, names as strings, NaN as null."""
    match value:
        case None | bool():
            return value
        case str():
            return str(value)
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(name): plain(one) for name, one in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(one) for one in value]
        case _ if hasattr(value, "tolist") and not isinstance(value, Complex):  # arrays of numpy and torch
            return plain(value.tolist())
        case _:
            return str(value)


def to_json(value: Any) -> str:
    """The value on one line of JSON, as readable as UTF-8 lets it be.

    Raises ValueError for numbers that are not finite; `plain` turns them into null.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half a character, as a tokenizer may leave it, is no UTF-8; as an escape it is JSON all the same.
    return _SURROGATES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _replace(real: Path, content: io.BytesIO) -> None:
    temporary = real.with_name(f".attnflow-{secrets.token_hex(8)}")
    try:
        with _removed_when_terminated(temporary):
            with open(temporary, "xb") as file:
                if real.exists():
                    os.chmod(temporary, stat.S_IMODE(real.stat().st_mode))
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, real)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _removed_when_terminated(temporary: Path) -> Generator[None]:
    """Remove the file before SIGTERM or SIGHUP ends the process, as they do unless somebody handles or ignores them."""

    def end(number: int, _frame: object) -> None:
        temporary.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    ours = list[int]()
    if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
        ours = [one for one in _ENDS if signal.getsignal(one) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _takes_a_stream(mode: int) -> bool:
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
