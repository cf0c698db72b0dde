"""Files and folders that survive a kill: atomic replacement, and append-only JSONL with resume.

A file is either the old one or the new one, never half of each: it is written beside its target and renamed over it.
Records are appended one line at a time; a line torn by a kill is cut off on resume.
"""

import gzip
import hashlib
import json
import mmap
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: str | Path, text: str) -> Path:
    """Replace `path` by `text` (UTF-8), as `write_bytes`."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Replace `path` in one step, making its folders. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic within one file system only. Not by `tempfile`, whose files only
    # their owner may read.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def write_json(path: str | Path, value: Any) -> Path:
    """Replace `path` by `value` as indented JSON. NaN and infinity are refused: they are not JSON."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be written: its value is no JSON: {error}") from error
    return write_text(path, text + "\n")


def decoded(data: bytes, where: object) -> str:
    """The text of UTF-8 bytes, with a byte order mark or without. ValueError begins with `where`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 text: {error.reason}; save it as UTF-8, not as UTF-16 or ANSI"
        ) from error


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, with a byte order mark or without."""
    return decoded(Path(path).read_bytes(), path)


def read_json(path: str | Path) -> Any:
    """The value in a JSON file. ValueError names file and line."""
    return parse_json(read_text(path), path)


def parse_json(text: str, path: str | Path | None = None, line: int | None = None) -> Any:
    """The value of a JSON text, which is all of the file `path`, or its line `line`: errors begin with that place.

    ValueError also if an object has a key twice, because Python would drop the first.
    """
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        line = line or error.lineno
        fault = f"not valid JSON: {error.msg}"
    except RecursionError:
        fault = "not JSON that can be read: it is nested too deeply"
    except ValueError as error:
        # Python reads no whole number of more than 4,300 digits.
        fault = str(error)
    if path is not None:
        fault = f"{path}: {fault}" if line is None else f"{path}:{line}: {fault}"
    raise ValueError(fault)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice in one object: leave one of the two out")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
"""Constructed once: `json.loads` would construct one for each of a million records."""


def write_jsonl(path: str | Path, rows: Iterable[Any]) -> Path:
    """Replace `path` by one JSON value per line."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    return write_text(path, "".join(lines))


def read_jsonl(path: str | Path, torn_end: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) of each non-empty line, unzipped where the name ends in .gz.

    ValueError names file and line. With `torn_end` a broken last line without its newline is left out: a record that is
    being written, or whose writing was killed.
    """
    # Bytes, decoded line by line: an error then names the line that holds the broken character.
    opened: Callable[..., Any] = gzip.open if Path(path).suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    # In a file joined from several, each part may begin with a byte order mark.
                    text = decoded(line, f"{path}:{number}")
                    value = parse_json(text, path, number) if text.strip() else None
                except ValueError:
                    if torn_end and not line.endswith(b"\n"):
                        return
                    raise
                if text.strip():
                    yield number, value
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        # Bytes are decompressed in blocks, so the fault is somewhere after this line.
        raise ValueError(f"{path}:{number}: cannot be read: {error}") from error


def resume_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The records already in `path` ([] if there is no such file). Truncates the file after the last whole one.

    A kill leaves a last line without its newline, and only that line is dropped. A broken line elsewhere is an error.
    """
    path = Path(path)
    if not path.exists():
        return []
    _cut_torn_line(path)
    return [value for _, value in read_jsonl(path)]


def _cut_torn_line(path: Path) -> None:
    size = path.stat().st_size
    # An empty file cannot be mapped.
    if size == 0:
        return
    # Whole records end in a newline. Mapped, because only the pages of the end are then read, however long the file is.
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
    if end < size:
        os.truncate(path, end)


@contextmanager
def append_jsonl(path: str | Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that appends one record as one line and flushes it; a line torn by a kill is cut off first."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        _cut_torn_line(path)
    with open(path, "a", encoding="utf-8") as stream:

        def write(record: dict[str, Any]) -> None:
            # Encoded before anything is written: a record that is not JSON leaves no torn line.
            line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
            stream.write(line)
            stream.flush()

        yield write


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, 64 hex digits."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(parts: Iterable[str | bytes]) -> str:
    """16 hex digits of the SHA-256 of texts or bytes, joined."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode() if isinstance(part, str) else part)
    return sha.hexdigest()[:16]


def cache_folder() -> Path:
    """Folder of files that can be remade: $COLAR_CACHE, if that is not empty, or colar/ in the user's cache folder."""
    if own := os.environ.get("COLAR_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colar"


def require_writable(folder: str | Path) -> Path:
    """Make `folder` and check, before any long work, that a file can be written there. ValueError with the reason."""
    # An empty name comes from a shell variable that was never set; Path would turn it into the working directory.
    if folder == "":
        raise ValueError("the output folder has no name: it is an empty text")
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"cannot write to {folder}: it is a file, and a folder is needed")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror or error}") from error
    return folder


@contextmanager
def replace_folder(target: str | Path) -> Iterator[Path]:
    """Yield a fresh folder to fill, which replaces `target` at the end.

        fill .name.partial  ->  name to .name.old  ->  .name.partial to name  ->  remove .name.old

    An error while it is filled leaves the old folder as it was. A kill between the two renames leaves the old folder as
    `.name.old`, and the next call puts it back. The files get the permissions of the umask. If `target` is a link, the
    folder that it points to is replaced.
    """
    target = Path(target)
    # Else the link itself would be renamed to `old` and stay, and no folder can be renamed over it the next time.
    if target.is_symlink():
        target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.old")

    # Clean up after an earlier kill.
    if old.exists() and not target.exists():
        os.replace(old, target)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)

    partial.mkdir()
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    # From 0.8 on, safetensors writes files that only their owner may read, but a server may run as another user. The
    # umask is taken from the new folder's permissions, because it can only be read by setting it.
    mode = partial.stat().st_mode & 0o666
    for path in partial.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    # A folder cannot be renamed over another one that holds files, hence two renames.
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)
