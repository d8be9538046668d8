"""A decoder step in compiled code, for CPUs: optional, built on first use where there is a C++ compiler."""

from pagedlc_engine.native.attention import NativeAttention, NativeStep
from pagedlc_engine.native.decoder import NativeDecoder, unsupported
from pagedlc_engine.native.library import Library, load_library

__all__ = ["Library", "NativeAttention", "NativeDecoder", "NativeStep", "load_library", "unsupported"]
