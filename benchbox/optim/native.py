"""Compilation of `native.c` on first use. Everything also works without a compiler, only slower."""

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

from benchbox.store.machine_cache import user_cache

_log = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
PART_ELEMENTS = 2**18  # of which threads take one after another: few enough that they end together, many enough to cost nothing
_FLAGS = (
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",  # comparisons of floats may be made in vectors
    "-ffp-contract=off",
    "-fopenmp-simd",
    "-shared",
    "-fPIC",
    f"-DPART_ELEMENTS={PART_ELEMENTS}",
)
# By torch's name of the CPU capability: the instruction sets that torch's own kernels use. On other processors a fused
# multiply-add may be a function call.
VECTOR_FLAGS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions with their types, or None if they are not available; the reason is logged once."""
    vector_flags = VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability())
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if vector_flags is None or compiler is None:
        reason = (
            "this processor is not supported" if vector_flags is None else f"there is no C compiler ({', '.join(COMPILERS)})"
        )
        _log.info("optimizer steps on CPUs use torch's slower kernels: %s", reason)
        return None
    try:
        return _declare_types(ctypes.CDLL(str(_build(compiler, (*_FLAGS, *vector_flags)))))
    # RuntimeError: the user has no home folder.
    except (OSError, RuntimeError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        message = getattr(error, "stderr", None) or str(error)
        _log.warning(
            "optimizer steps on CPUs use torch's slower kernels: native.c could not be built with %s: %s; install a working "
            "compiler, or set XDG_CACHE_HOME to a folder that only you can write to",
            compiler,
            (message.strip() or type(error).__name__).splitlines()[0],
        )
        return None


def _build(compiler: str, flags: tuple[str, ...]) -> Path:
    """Return the path of the shared object in the cache, and compile it if it is not there.

    Ranks may do so at the same time: each compiles its own copy and moves it into place atomically.

    Raises:
        OSError: the cache cannot be written to, or other users can write to it.
        RuntimeError: there is no home folder for the cache.
        CalledProcessError, TimeoutExpired: the compiler failed.
    """
    source = Path(__file__).with_suffix(".c")
    inputs = (source.read_text(), _run([compiler, "--version"]), *flags)
    key = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    folder = user_cache() / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    shared_object = folder / f"{key}.so"
    if not shared_object.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            output = Path(temporary) / shared_object.name
            _run([compiler, *flags, "-o", str(output), str(source), "-lm"])
            output.chmod(0o700)  # compilers follow the umask, which often makes files writable for the group
            output.replace(shared_object)
    for path in (folder, shared_object):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(f"{path} can be written by others")
    return shared_object


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


class SquaresJob(ctypes.Structure):
    """An even number of consecutive bfloat16 values."""

    _fields_ = (("count", ctypes.c_size_t), ("values", ctypes.c_void_p))


class AdamWJob(ctypes.Structure):
    """Consecutive elements of one step of AdamW, with its coefficients."""

    _fields_ = (
        ("count", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("master", "exp_avg", "exp_avg_sq", "gradient", "live")),
        *((name, ctypes.c_float) for name in ("divisor", "decay", "one_minus_beta1", "beta2", "one_minus_beta2")),
        *((name, ctypes.c_float) for name in ("bias_correction2_sqrt", "epsilon", "step_size")),
    )


def _declare_types(functions: ctypes.CDLL) -> ctypes.CDLL:
    sums = ctypes.POINTER(ctypes.c_double)
    functions.sum_of_squares.argtypes = [ctypes.POINTER(SquaresJob), ctypes.c_size_t, sums, ctypes.c_uint]
    functions.adamw.argtypes = [ctypes.POINTER(AdamWJob), ctypes.c_size_t, ctypes.c_uint]
    functions.sum_of_squares.restype = functions.adamw.restype = None
    return functions
