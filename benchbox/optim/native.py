"""`native.c`, compiled when first needed, where there is a compiler; everything works without it, only slower."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-fno-math-errno", "-ffp-contract=off", "-fopenmp-simd", "-shared", "-fPIC")
# What torch's own kernels use, by the name it has for it. Elsewhere fused multiply-add may be a function call.
VECTORS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, with their types, or None where they cannot be had; why not is logged, once."""
    vectors = VECTORS.get(torch.backends.cpu.get_cpu_capability())
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if vectors is None or compiler is None:
        reason = "this processor is not known" if vectors is None else f"there is no C compiler ({', '.join(COMPILERS)})"
        _log.info("optimizer steps on CPUs take torch's slower kernels: %s", reason)
        return None
    try:
        return _typed(ctypes.CDLL(str(_built(compiler, (*_FLAGS, *vectors)))))
    # RuntimeError: a user without a home.
    except (OSError, RuntimeError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = getattr(error, "stderr", None) or str(error)
        _log.warning(
            "optimizer steps on CPUs take torch's slower kernels: native.c could not be built with %s: %s; install a compiler "
            "that works, or set XDG_CACHE_HOME to a folder that only you can write",
            compiler,
            (said.strip() or type(error).__name__).splitlines()[0],
        )
        return None


def _built(compiler: str, flags: tuple[str, ...]) -> Path:
    """The shared object, from the cache or made now. Ranks may race: each builds its own, and moving it into place is atomic.

    Raises:
        OSError: the cache cannot be written, or somebody else could have written it.
        RuntimeError: there is no home folder to keep it in.
        CalledProcessError, TimeoutExpired: the compiler failed.
    """
    source = Path(__file__).with_suffix(".c")
    of = (source.read_text(), _said([compiler, "--version"]), *flags)
    key = hashlib.sha256("\0".join(of).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "benchbox" / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = folder / f"{key}.so"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / made.name
            _said([compiler, *flags, "-o", str(fresh), str(source), "-lm"])
            fresh.chmod(0o700)  # compilers leave it to the umask, which often lets a group write
            fresh.replace(made)
    for path in (folder, made):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(f"{path} can be written by others")
    return made


def _said(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def _typed(functions: ctypes.CDLL) -> ctypes.CDLL:
    functions.sum_of_squares.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    functions.sum_of_squares.restype = ctypes.c_double
    functions.adamw.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_size_t] + [ctypes.c_float] * 8
    functions.adamw.restype = None
    return functions
