"""Triton kernels, each beside a plain-torch reference of the same signature.

The modules here import Triton; nothing outside does, and the engine imports them only when a GPU backend is chosen.
"""
