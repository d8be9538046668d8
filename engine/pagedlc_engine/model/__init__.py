"""Models: what they are (spec), what they weigh (loaders) and how they compute (decoder)."""

from pagedlc_engine.model.decoder import Decoder, LayerAttention
from pagedlc_engine.model.half import half_available
from pagedlc_engine.model.int8 import int8_available
from pagedlc_engine.model.spec import SUPPORTED_ARCHITECTURES, ModelSpec, RopeSpec, read_spec
from pagedlc_engine.model.weights import load_model

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "Decoder",
    "LayerAttention",
    "ModelSpec",
    "RopeSpec",
    "half_available",
    "int8_available",
    "load_model",
    "read_spec",
]
