"""Folders: one that can be written, one that no other process writes to, one that is replaced as a whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from colar import files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def cache_folder() -> Path:
    """Folder of what can be made again: $COLAR_CACHE, or colar/ in the user's cache folder."""
    if "COLAR_CACHE" in os.environ:
        return Path(os.environ["COLAR_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "colar"


def require_writable(folder: str | Path) -> Path:
    """Make `folder` and prove that a file can be written there, before any long work. ValueError says why not."""
    # The working directory is `.`: an empty name is a shell's variable that was never set.
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


_held: set[Path] = set()
"""Folders that this process has locked: a nested block asks for no second lock, which would refuse its own process."""


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Keep other processes out of `folder` inside the block; ValueError where one is writing there already.

    The lock belongs to the process (blocks may be nested) and ends with it, also when it is killed. A system or a
    file system without locks keeps no process out.
    """
    folder = Path(folder).resolve()
    if fcntl is None or folder in _held:
        yield
        return
    with open(folder / ".lock", "ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing to {folder}: let it end, or name another output folder"
            ) from None
        except OSError:
            # A file system without locks: better unguarded than not at all.
            pass
        _held.add(folder)
        try:
            yield
        finally:
            _held.discard(folder)


@contextmanager
def replace_folder(target: str | Path) -> Iterator[Path]:
    """Give a fresh folder to fill; at the end it takes the place of `target`.

        fill .name.partial  ->  name to .name.old  ->  .name.partial to name  ->  remove .name.old

    An error while it is filled leaves the old folder. A kill leaves the old one or the new one; between the
    two renames it leaves the old one as `.name.old`, and the next call puts it back. Files can be
    read by whom the umask lets. Where `target` is a link, the folder that it leads to is replaced.
    """
    target = Path(target)
    # A link would be moved away and left behind, and no folder can be renamed over it the next time.
    if target.is_symlink():
        target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.old")

    # What an earlier kill left: a folder that was moved away comes back, an unfinished one goes.
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
    # Some libraries write files that only their owner may read: safetensors from 0.8 on. A server has its own user.
    mode = files.shared_mode()
    for path in partial.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    # A folder cannot be renamed over another one that holds files, hence two renames.
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)
