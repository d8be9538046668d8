"""Attention over the paged KV cache: one interface, one backend per kind of device."""

from pagedlc_engine.attention.base import AttentionBackend, AttentionBatch, LayerAttention

__all__ = ["AttentionBackend", "AttentionBatch", "LayerAttention"]
