"""What the engine must know about a model before it reads any weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pagedlc_engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelSpec", "RopeSpec", "find_format", "read_spec"]

#: Architectures by their Hugging Face names.
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding.

    Args:
        theta: Base of the wavelengths.
        scaling: ``None`` for plain rotary embedding; otherwise ``"type"`` (``linear``, ``dynamic``, ``yarn``,
            ``llama3`` or ``factors``) and that type's numbers, see :mod:`pagedlc_engine.model.rope`.
    """

    theta: float
    scaling: Mapping[str, object] | None = None

    def __reduce__(self) -> tuple[type[RopeSpec], tuple[float, dict[str, object] | None]]:
        return RopeSpec, (self.theta, None if self.scaling is None else dict(self.scaling))

    @staticmethod
    def scaled(theta: float, kind: str, **numbers: object) -> RopeSpec:
        """A spec with an unchangeable ``scaling`` mapping."""
        return RopeSpec(theta, MappingProxyType({"type": kind, **numbers}))


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and switches of a decoder-only transformer.

    Args:
        architecture: One of :data:`SUPPORTED_ARCHITECTURES`.
        layer_windows: Per layer the attention window in tokens, ``None`` for full attention.
        max_position_embeddings: Longest sequence in tokens the model is made for.
        qk_norm: RMS norm over each query and key head before the rotation.
        eos_token_ids: Tokens that end an answer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    layer_windows: tuple[int | None, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def sliding_window(self) -> int | None:
        """The narrowest attention window of any layer, ``None`` when every layer sees everything."""
        return min((window for window in self.layer_windows if window is not None), default=None)

    def check(self) -> None:
        """Raise :class:`ModelLoadError` when the numbers contradict each other."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"The model's {name} is {getattr(self, name)}; it must be at least 1.")
        if self.max_position_embeddings < 2:
            raise ModelLoadError(
                f"The model's context is {self.max_position_embeddings} tokens; it must be at least 2."
            )
        if not (self.rms_norm_eps >= 0 and self.rope.theta > 0):
            raise ModelLoadError(f"rms_norm_eps is {self.rms_norm_eps} and rope_theta {self.rope.theta}.")
        for name, value in (self.rope.scaling or {}).items():
            if name.endswith("factor") and value is not None and not float(str(value)) > 0:
                raise ModelLoadError(f"The rotary scaling's {name} is {value!r}; it must be a positive number.")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly.")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelLoadError(f"The head size is {self.head_dim}; rotary embedding needs an even number.")
        if len(self.layer_windows) != self.num_layers:
            raise ModelLoadError(f"{len(self.layer_windows)} layer types are given for {self.num_layers} layers.")


def find_format(path: Path, load_format: str = "auto") -> tuple[str, Path]:
    """Where a model's weights are.

    Args:
        path: A ``.gguf`` file, or a folder with safetensors or one ``.gguf`` file.
        load_format: ``"auto"``, ``"gguf"``, ``"safetensors"`` or ``"dummy"``.

    Returns:
        ``("gguf", file)``, ``("safetensors", folder)`` or ``("dummy", file or folder)``.

    Raises:
        ModelNotFoundError: Nothing like that lies at ``path``.
        UnsupportedModelError: There are weights, but in a format the engine does not read.
    """
    if not path.exists():
        raise ModelNotFoundError(f"No model at {path}: the path does not exist.")
    if load_format == "dummy":
        return "dummy", path
    if path.is_file():
        if load_format == "safetensors":
            raise ModelLoadError(f"{path} is a file; safetensors models are folders with config.json in them.")
        return "gguf", path
    return _format_of_folder(path, load_format)


def _format_of_folder(path: Path, load_format: str) -> tuple[str, Path]:
    ggufs = sorted(path.glob("*.gguf"))
    tensors = sorted(path.glob("*.safetensors"))
    if tensors and load_format != "gguf":
        return "safetensors", path
    if load_format == "safetensors":
        raise ModelNotFoundError(f"No .safetensors file in {path}.")
    if len(ggufs) == 1:
        return "gguf", ggufs[0]
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ModelLoadError(f"{path} holds several GGUF files ({names}); give the path of one of them.")
    if load_format == "gguf":
        raise ModelNotFoundError(f"No .gguf file in {path}.")
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise UnsupportedModelError(
            f"{path} holds weights in PyTorch's pickle format only; convert them to safetensors (save_pretrained)."
        )
    raise ModelNotFoundError(f"No model in {path}: neither .safetensors nor .gguf files are there.")


def read_spec(path: Path, load_format: str = "auto") -> ModelSpec:
    """Read what kind of model lies at ``path`` and check its files, without reading weights.

    Args:
        path: A ``.gguf`` file, or a folder with ``config.json`` (and safetensors) or one ``.gguf`` file.
        load_format: As in :class:`~pagedlc_engine.config.EngineConfig`.

    Raises:
        ModelNotFoundError: Nothing that could be a model lies there.
        UnsupportedModelError: A model the engine cannot run; the message says why.
        ModelLoadError: A file is damaged or truncated.
    """
    from pagedlc_engine.model.gguf_spec import spec_from_gguf
    from pagedlc_engine.model.hf_spec import spec_from_folder
    from pagedlc_engine.model.loaders.gguf_file import GGUFFile
    from pagedlc_engine.model.loaders.safetensors import check_safetensors

    kind, where = find_format(path, load_format)
    try:
        if kind == "gguf" or (kind == "dummy" and where.is_file()):
            spec = spec_from_gguf(GGUFFile.open(where))
        else:
            spec = spec_from_folder(where)
        spec.check()
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ModelLoadError(f"{where}: the model's description holds a value that makes no sense: {error}") from error
    if kind == "safetensors":
        check_safetensors(where, spec)
    return spec
