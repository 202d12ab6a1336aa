"""Reading and writing files; a write either completes or leaves the earlier file as it was."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from io import BufferedReader, BytesIO
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

from kvsearch.core.errors import EnvironmentFault, KvsearchError, UsageError
from kvsearch.core.limits import MOST_DATA

_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose a writable place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "name a file that no link leads back to",
}
TYPED = (errno.ENAMETOOLONG, errno.ELOOP)  # errors of the system that are those of a name

_PIECE = 1 << 20  # bytes that are unpacked at a time
_LOOKED_AT = 1000  # bytes that an encoding is guessed from


def read_bytes(path: str | Path, max_bytes: int = MOST_DATA) -> bytes:
    """Read a whole file of at most so many bytes; raises as `open_file`, or UsageError: it is a device, or larger."""
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise UsageError(f"{path} is a device, which may have no end: name a file")
        if status.st_size <= max_bytes:  # 0 of a pipe
            data = file.read()
            if len(data) <= max_bytes:
                return data
    raise _too_large_error(path, max_bytes)


@contextmanager
def open_file(path: str | Path) -> Iterator[BufferedReader]:
    """Open a file for reading; errors of the system become errors that name the path.

    Raises:
        UsageError: there is no such file, or it is a folder.
        EnvironmentFault: it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            yield file
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"there is no file {path}: check the path") from error
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a folder: name a file in it") from error
    except OSError as error:
        raise _system_error(error, f"cannot read {path}") from error
    except ValueError as error:  # a zero byte in the name
        raise UsageError(f"cannot read {path!r}: {error}") from error


# --- content: compressed or not, text in any encoding that says what it is --------------------------------------------

# How files of a format begin, as patterns that no text fits: letters alone are not enough, as in "PAR1: a beginning".
PARQUET: Final = rb"PAR1\x15"  # its first page, or what it says of none, begins so in Thrift's compact protocol
_GZIP: Final = rb"\x1f\x8b"
_BZIP2: Final = rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"  # the first block, or the end where there is none
_XZ: Final = rb"\xfd7zXZ\0"
_COMPRESSED = {_GZIP: "gzip", _BZIP2: "bz2", _XZ: "lzma"}  # modules of Python by what they unpack
_MARKS = (  # byte order marks; that of UTF-16 begins one of UTF-32
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"),
)  # fmt: skip
_UNPACK = "unpack it first"
_PLAIN = "save it as plain text"
_KINDS = {
    rb"%PDF-\d": ("a PDF", "give its text, as `pdftotext` writes it"),
    rb"PK\x03\x04": ("a zip archive, as .docx, .xlsx and .epub files are", f"unpack it, or {_PLAIN}"),
    rb"\xd0\xcf\x11\xe0": ("an old Office document", _PLAIN),
    rb"\{\\rtf\d": ("a document in rich text (RTF)", _PLAIN),
    _GZIP: ("compressed by gzip", _UNPACK),
    _BZIP2: ("compressed by bzip2", _UNPACK),
    _XZ: ("compressed by xz", _UNPACK),
    rb"\x28\xb5\x2f\xfd": ("compressed by zstd", f"{_UNPACK}, with `zstd -d`"),
    rb"\x04\x22\x4d\x18": ("compressed by lz4", f"{_UNPACK}, with `lz4 -d`"),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    rb"Rar!\x1a": ("a RAR archive", _UNPACK),
    PARQUET: ("a Parquet file, a table", "write its text to a file"),
    rb"ARROW1\0": ("an Arrow file, a table", "write it as Parquet or JSON Lines"),
    rb"SQLite format 3\0": ("an SQLite database", "write its rows as JSON Lines"),
    rb"\x93NUMPY": ("an array of NumPy", "give text"),
    rb"\x89PNG": ("a picture (PNG)", "give text"),
    rb"GIF8[79]a.{6}\0": ("a picture (GIF)", "give text"),  # behind its size: pixels are as wide as high
    rb"\xff\xd8\xff": ("a picture (JPEG)", "give text"),
}  # what is no text, by how it begins, and what to do
_CONVERT = "iconv -f {} -t utf-8 FILE > NEW"


def read_text(path: str | Path, name: str | None = None, max_bytes: int = MOST_DATA) -> str:
    """Read a whole text file, called `name` where it is no text; raises as `read_unpacked` and `decode_text`."""
    return decode_text(read_unpacked(path, max_bytes), name or str(path))


def read_unpacked(path: str | Path, max_bytes: int = MOST_DATA) -> bytes:
    """Read a file whole, and unpack it if it is compressed by gzip, bzip2 or xz, to at most so many bytes.

    Raises:
        UsageError: as `read_bytes`, or what is compressed is damaged.
        EnvironmentFault: as `read_bytes`.
    """
    data = read_bytes(path, max_bytes)
    try:
        library = next((import_module(name) for form, name in _COMPRESSED.items() if is_of_form(data, form)), None)
    except ImportError:  # Python was built without it: what reads the data says what it is
        library = None
    if library is None:
        return data
    faults = (OSError, EOFError, zlib.error, getattr(library, "LZMAError", EOFError))
    try:
        with library.open(BytesIO(data)) as file:
            unpacked: bytes = b"".join(islice(iter(partial(file.read, _PIECE), b""), max_bytes // _PIECE + 1))
    except faults as error:
        problem = f"{path} is compressed by {library.__name__} and cannot be unpacked ({error}): fetch it again"
        raise UsageError(problem) from error
    if len(unpacked) > max_bytes:
        raise _too_large_error(path, max_bytes)
    return unpacked


def is_of_form(data: bytes, form: bytes) -> bool:
    """Tell whether data begins as files of a format do, given as a pattern such as `PARQUET`."""
    return re.match(form, data, re.DOTALL) is not None


def decode_text(data: bytes, name: str) -> str:
    """Return text as it is in UTF-8, or in UTF-16 or UTF-32 with a byte order mark, which is no part of it.

    Line ends stay as they are.

    Raises:
        UsageError: it is in another encoding, or no text; says at which byte, or what it is, and what to do.
    """
    kind = next((kind for form, kind in _KINDS.items() if is_of_form(data, form)), None)
    if kind is not None:
        raise UsageError(f"{name} is {kind[0]}: {kind[1]}")
    encoding = next((encoding for mark, encoding in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} {_encoding_error(data, encoding, error.start)}") from error
    if "\0" in text:
        raise UsageError(f"{name} {_describe_zeros(data, text)}")
    return text


def _encoding_error(data: bytes, encoding: str, place: int) -> str:
    """Say where data is not in an encoding, and how to convert it."""
    if encoding == "utf-8-sig":
        place += 3  # Python counts from behind the mark
    known = encoding.upper().removesuffix("-SIG")
    at = f"is not {known} text: byte {place} is {data[place]:#04x}"
    if known != "UTF-8":
        return f"{at}, though it begins with the byte order mark of {known}: write it again, in UTF-8"
    line = data.count(b"\n", 0, place) + 1
    if b"\0" in data:
        return f"{at}, and it has zero bytes: it is binary, give text"
    likely = "cp1252" if any(0x80 <= byte < 0xA0 for byte in data[place : place + _LOOKED_AT]) else "latin1"
    return f"{at}, in line {line}; if it is in {likely}, convert it: {_CONVERT.format(likely)}"


def _describe_zeros(data: bytes, text: str) -> str:
    """Say what text with zero bytes is; in UTF-16 every other byte of plain letters is one."""
    if data[257:262] == b"ustar":
        return f"is a tar archive: {_UNPACK}"
    pairs = data[:_LOOKED_AT]
    for encoding, zeros, letters in (("utf-16le", pairs[1::2], pairs[::2]), ("utf-16be", pairs[::2], pairs[1::2])):
        if zeros.count(0) > len(zeros) // 2 and not letters.count(0):
            return f"looks like {encoding} without a byte order mark: convert it: {_CONVERT.format(encoding)}"
    return f"is binary, no text: character {text.index(chr(0))} is zero"


def _too_large_error(path: str | Path, max_bytes: int) -> UsageError:
    return UsageError(f"{path} is larger than the {max_bytes} bytes that such a file may have: is it the right one?")


# --- writing ----------------------------------------------------------------------------------------------------------


def write_atomically(path: str | Path, data: bytes | Iterable[bytes | memoryview], overwrite: bool = True) -> None:
    """Replace the content of `path` in one step that survives a crash; links are followed, the file mode is kept.

    What is large can be given in pieces, which are asked for one by one. A file that holds what is given whole already
    is left as it is.

    Raises:
        UsageError: `path` holds something else and `overwrite` is off, is a folder or device, or its folder does not
            exist.
        EnvironmentFault: the disk is full, permissions are missing; an existing file is left as it was.
    """
    try:
        target = resolve_path(path)
        mode = _read_mode(target)
        if not overwrite and _holds(target, data):
            return
        _replace(target, data, mode, overwrite)
        logging.getLogger("kvsearch").debug("wrote %s, %s bytes", path, target.stat().st_size)
    except OSError as error:
        raise _system_error(error, f"cannot write {path}") from error
    with suppress(OSError):  # the file is complete by now, and some file systems cannot sync folders
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def resolve_path(path: str | Path) -> Path:
    """Resolve a path and its links; UsageError for a link to itself, or a zero byte in the name."""
    try:
        return Path(path).resolve()
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{str(path)!r} leads nowhere: {error}") from error


def _system_error(error: OSError, problem: str) -> KvsearchError:
    """Return what to say of an error of the system: a name that cannot be one is the request's fault."""
    kind = UsageError if error.errno in TYPED else EnvironmentFault
    return kind(f"{problem}: {_format_reason(error)}")


def write_fault(error: OSError, path: Path, then: str) -> EnvironmentFault:
    """Return what to say of a file that a run cannot write; `then` is how to go on once the cause is removed."""
    return EnvironmentFault(f"cannot write {path}: {_format_reason(error)}, then {then}")


def check_output(path: Path, force: bool) -> None:
    """Find out, before there is anything to write, whether a command may write a file at `path`.

    Raises:
        UsageError: there can be no file, or there is one and `force` is off.
    """
    check_target(path)
    if path.exists() and not force:
        raise UsageError(f"{path} exists: choose another file, or --force to replace it")


def require_directory(path: Path) -> None:
    """Raise UsageError, before anything is written, if there can be no directory at `path`: it is a file."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: give a directory to write to")


def check_target(path: str | Path) -> None:
    """Raise UsageError if `path` cannot become a file: it is a folder or device, or its folder does not exist."""
    _read_mode(resolve_path(path))


def _read_mode(target: Path) -> int | None:
    """Return the permission bits of an existing regular file, None for a new one."""
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not target.parent.is_dir():
            raise UsageError(f"cannot write {target}: its folder does not exist, create it first") from None
        return None
    except OSError as error:
        raise _system_error(error, f"cannot write {target}") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UsageError(f"cannot write {target}: it is {what}, name a file")
    return stat.S_IMODE(mode)


def _holds(target: Path, data: bytes | Iterable[bytes | memoryview]) -> bool:
    """Tell whether a file holds the data; False if there is none, UsageError if it holds something else."""
    if not target.exists():
        return False
    if target.read_bytes() == data:
        return True
    raise UsageError(f"{target} exists already and holds something else: choose another name, or delete it first")


def _replace(target: Path, data: bytes | Iterable[bytes | memoryview], mode: int | None, overwrite: bool) -> None:
    with open_temporary(target) as (temporary, file):
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        if not overwrite and _holds(target, data):  # another process has made it meanwhile
            temporary.unlink()
        else:
            temporary.replace(target)


def _format_reason(error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and the permissions")
    return f"{(error.strerror or str(error)).lower()}, {remedy}"


TEMPORARY = ".kvsearch-"  # begins the name of a file that is there only while a process works
TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def open_temporary(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new file next to `target`, and its path; it is removed unless it is renamed before the end.

    Its writer has the system's lock on it, which ends with the process: so what a killed one left of the same target is
    told from what another one is writing now, and removed. A file system without locks keeps it.

    Raises:
        OSError: the file cannot be made.
    """
    beginning = f"{TEMPORARY}{hashlib.sha256(target.name.encode(errors='surrogateescape')).hexdigest()[:8]}-"
    for left in target.parent.iterdir():
        if left.name.startswith(beginning) and left.suffix == TEMPORARY_SUFFIX:
            with suppress(OSError), left.open("rb") as abandoned:
                fcntl.flock(abandoned, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
    path, file = _open_locked(target.parent, beginning)
    try:
        with file:
            yield path, file
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _open_locked(folder: Path, beginning: str) -> tuple[Path, BinaryIO]:
    """Make a new file whose name begins so, and lock it."""
    while True:
        path = folder / f"{beginning}{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        file = path.open("xb")
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return path, file
        except BaseException:
            file.close()
            raise
        file.close()  # who looked at it before it was locked took it for abandoned
