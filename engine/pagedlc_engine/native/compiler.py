"""Builds the C++ of this package with the compiler of the machine it runs on, once, into the user's cache folder."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["FLAGS", "GROUP", "MOST_HEAD_DIM", "MOST_QUERIES", "PANEL", "BuildError", "build"]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
#: Numbers that share a scale; everything that is quantized comes in whole groups.
GROUP = 32
#: Outputs that lie together in a packed weight.
PANEL = 32
#: Query heads times tokens that go over the keys together.
MOST_QUERIES = 96
MOST_HEAD_DIM = 256
#: ``-ffp-contract=off``: a sum must not come out differently where the compiler sees a chance to merge two operations.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
    "-w",
    f"-DPAGEDLC_GROUP={GROUP}",
    f"-DPAGEDLC_PANEL={PANEL}",
    f"-DPAGEDLC_MOST_QUERIES={MOST_QUERIES}",
    f"-DPAGEDLC_MOST_HEAD_DIM={MOST_HEAD_DIM}",
)
#: Libraries that stay in the cache: those of other compilers and machines with the same home, and the last versions'.
_MOST_KEPT = 8
_TIMEOUT_SECONDS = 90


class BuildError(Exception):
    """There is no usable compiler; the message says why, in one line."""


def build(flags: tuple[str, ...] = FLAGS) -> Path:
    """The shared library, compiled if need be.

    Several processes may build at once: each writes a file of its own and renames it when it is complete.

    Args:
        flags: Options of the compiler.

    Raises:
        BuildError: No compiler, or it failed.
    """
    compiler = _compiler()
    version = _run([*compiler, "--version"])
    folders, fingerprint = _cache_folders(), _fingerprint(compiler, version, flags)
    for found in (file for folder in folders for file in sorted(folder.glob(f"{fingerprint}-*.so"))):
        # Of use again: nobody deletes it now. One that may not be touched can be read all the same.
        with contextlib.suppress(OSError):
            found.touch()
        if found == _target(found.parent, fingerprint, found.read_bytes()):
            return found
        logger.warning("%s is damaged and is compiled again.", found)
        with contextlib.suppress(OSError):
            found.unlink()
    return _compile(compiler, flags, folders[-1], fingerprint)


def _target(folder: Path, fingerprint: str, content: bytes) -> Path:
    """Names what it holds: to load half a library would kill the process."""
    return folder / f"{fingerprint}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _compiler() -> list[str]:
    """The command of the C++ compiler: ``$CXX``, or the first one on the path."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"$CXX cannot be read ({error})") from error
    if chosen:
        return chosen
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError("there is no C++ compiler (c++, g++ or clang++) on the PATH")


def _compile(compiler: list[str], flags: tuple[str, ...], folder: Path, fingerprint: str) -> Path:
    logger.info("Compiling the native CPU step, once, into %s.", folder)
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _run([*compiler, *flags, str(SOURCES / "step.cpp"), "-o", name])
        target = _target(folder, fingerprint, Path(name).read_bytes())
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    _delete_oldest(folder)
    return target


def _delete_oldest(folder: Path) -> None:
    """Leave the libraries that were used last. A process that has loaded another keeps it."""
    ages = {}
    for file in folder.glob("*.so"):
        # Another process may be tidying up, too.
        with contextlib.suppress(FileNotFoundError):
            ages[file] = file.stat().st_mtime_ns
    for file in sorted(ages, key=ages.__getitem__, reverse=True)[_MOST_KEPT:]:
        file.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0].strip() if lines else f'exit status {done.returncode}'}")
    return done.stdout


def _cache_folders() -> list[Path]:
    """``pagedlc/native`` in the user's cache; then, where that cannot be written, a folder of this process."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser() / "pagedlc" / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return [_temporary_folder()]
    return [folder] if os.access(folder, os.W_OK) else [folder, _temporary_folder()]


@functools.cache
def _temporary_folder() -> Path:
    """Deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="pagedlc-native-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _fingerprint(compiler: list[str], version: str, flags: tuple[str, ...]) -> str:
    """Changes with all that the result depends on."""
    digest = hashlib.sha256()
    for part in (*compiler, version, *flags, platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _cpu_features() -> str:
    """What ``-march=native`` looks at, as Linux tells it; elsewhere the processor's name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "cpu family", "model\t")
    first = text.partition("\n\n")[0]
    return "\n".join(line for line in first.splitlines() if line.startswith(wanted))
