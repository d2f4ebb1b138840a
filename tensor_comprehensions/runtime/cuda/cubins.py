"""Machine code of CUDA source, from the cache if it was compiled before.

Invariant: cached code equals the current output of NVRTC, since its key has the source, the architecture, the version
and the options of the compiler.
"""

from __future__ import annotations

from dataclasses import astuple
from hashlib import sha256

from ...cache import stored_kernels as cache
from ...cache.key import Key
from ...cache.store import current_store
from ...cache.stored_kernels import StoredKernel
from . import nvrtc
from .nvrtc import Cubin, Resources, Toolchain


def cubin_of(source: str, architecture: str) -> Cubin:
    """Machine code for an architecture such as "sm_90". Raises as `nvrtc.compile_text`."""
    store = current_store()
    if store.mode == "off":
        return nvrtc.compile_text(source, architecture)
    key = cubin_key(source, architecture, nvrtc.find_toolchain())
    found = cache.find_kernel(store, key)
    if found is not None:
        try:
            return _restore_cubin(found, architecture)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            store.report_fault(f"the entry {key.digest} cannot be used: {error}")
    made = nvrtc.compile_text(source, architecture)
    facts = {"resources": {name: astuple(r) for name, r in made.resources.items()}}
    cache.store_kernel(store, StoredKernel(key, facts, made.binary))
    return made


def cubin_key(source: str, architecture: str, tools: Toolchain) -> Key:
    """The key of machine code. Folders of headers are left out: headers belong to the compiler's release."""
    options = [o for o in tools.options(architecture) if not o.startswith("--include-path")]
    return Key(
        (
            ("kind", "cubin"),
            ("text", sha256(source.encode()).hexdigest()),
            ("target.name", architecture),
            ("nvrtc", ".".join(map(str, tools.version))),
            ("options", " ".join(options)),
        )
    )


def _restore_cubin(code: StoredKernel, architecture: str) -> Cubin:
    reports = {str(name): Resources(*map(int, numbers)) for name, numbers in code.metadata["resources"].items()}
    return Cubin(architecture, code.data, reports)
