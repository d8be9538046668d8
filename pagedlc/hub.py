"""Model files from the Hugging Face hub, by the hub's own client, cache and environment variables."""

from __future__ import annotations

from pathlib import Path

from pagedlc_engine.errors import ModelNotFoundError

__all__ = ["download_snapshot"]

_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "tokenization_*.py")
#: Copies of the same weights in other layouts.
_DUPLICATES = ("original/*", "onnx/*", "consolidated*")


def download_snapshot(repo_id: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of a hub repository, downloaded as far as it is not cached.

    Args:
        repo_id: ``"organisation/name"``.
        revision: Branch, tag or commit; ``None`` is the main branch.
        weights: Also fetch ``*.safetensors``.

    Raises:
        ModelNotFoundError: There is no such repository or revision, it may not be read, or the hub is out of reach
            (or ``HF_HUB_OFFLINE`` is set) and the model is not cached.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_TEXT_FILES, "*.safetensors"] if weights else list(_TEXT_FILES)
    try:
        folder = snapshot_download(
            repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=list(_DUPLICATES)
        )
    except Exception as error:  # which errors the network library raises depends on the client's version
        raise ModelNotFoundError(_reason(repo_id, revision, error)) from error
    return Path(folder)


def _reason(repo_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{repo_id!r} is gated: accept its licence on the hub and log in (`hf auth login`, or set HF_TOKEN)."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"The Hugging Face hub has no model {repo_id!r} (or it is private), and there is no local path of "
            "that name. Check the spelling; for a private model log in (`hf auth login`, or set HF_TOKEN)."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"The model {repo_id!r} has no revision {revision!r}."
    if isinstance(error, errors.HFValidationError):
        return f"{repo_id!r} is neither an existing path nor a valid Hugging Face id."
    return (
        f"{repo_id!r} is no local path, is not complete in the Hugging Face cache, and cannot be downloaded: is the "
        f"network there (and HF_HUB_OFFLINE unset)? For a model on this machine give its path. ({_first_line(error)})"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
