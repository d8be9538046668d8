"""Text to token ids and back, the same for Hugging Face folders and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from pagedlc.gguf_metadata import read_gguf_metadata
from pagedlc.gguf_tokenizer import build_gguf_tokenizer, gguf_bos_token_id
from pagedlc.hub import download_snapshot
from pagedlc.models import ModelFiles
from pagedlc.text_bounds import TextBound, text_bound
from pagedlc.token_bytes import token_bytes
from pagedlc.tokenizer_folder import read_plain_folder
from pagedlc_engine.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from pagedlc_engine.grammar.vocabulary import TokenVocabulary

__all__ = ["Tokenizer"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
_GGUF_TEMPLATE = "tokenizer.chat_template"
_GGUF_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class Tokenizer:
    """A model's tokenizer with its special tokens and chat templates. Immutable; safe to use from many threads.

    Args:
        backend: The ``tokenizers`` library's tokenizer.
        eos_token_ids: Tokens that end an answer.
        bos_token_id: Token that begins a text, if the model has one.
        special_tokens_map: Names as templates use them (``"bos_token"``, ``"eos_token"``, ...) to token texts.
        chat_templates: Jinja chat templates by name; ``"default"`` is the usual one, ``"tool_use"`` the one for
            conversations with tools.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        special_tokens_map: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.eos_token_ids = tuple(dict.fromkeys(int(token) for token in eos_token_ids))
        self.bos_token_id = bos_token_id
        self.special_tokens_map = dict(special_tokens_map or {})
        self.chat_templates = dict(chat_templates or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def from_files(
        cls, files: ModelFiles, tokenizer: str | Path | None = None, trust_remote_code: bool = False
    ) -> Tokenizer:
        """The tokenizer of a resolved model.

        Args:
            files: From :func:`pagedlc.models.resolve_model`.
            tokenizer: Another source: a folder, a ``.gguf`` file, a ``tokenizer.json`` or a Hugging Face id.
            trust_remote_code: Allow Python code that lies beside the tokenizer to run.

        Raises:
            ModelNotFoundError: No tokenizer there.
            ModelLoadError: The tokenizer's files are damaged.
            UnsupportedModelError: A kind of tokenizer that cannot be read.
        """
        source = files.tokenizer if tokenizer is None else _resolve_source(str(tokenizer))
        if source.is_dir():
            return cls(**_read_folder(source, trust_remote_code))
        if source.suffix.lower() == ".gguf":
            return cls(**_read_gguf(source))
        return cls(**_read_json(source))

    @property
    def chat_template(self) -> str | None:
        """The model's usual Jinja chat template."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognised.

        Args:
            text: Any Unicode text.
            add_special_tokens: Add what the model expects around a text (usually a begin-of-text token, or nothing).

        Raises:
            InvalidRequestError: ``text`` is not a string of valid Unicode.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"A prompt's text must be a string, not {type(text).__name__}.")
        try:
            # As a batch of one: this lets go of the interpreter, and a long prompt does not hold up other threads.
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:  # lone surrogates
            raise InvalidRequestError("The text is not valid Unicode: it holds half of a surrogate pair.") from error
        ids: list[int] = encoding.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """No fewer tokens than this come of ``text``; 0 where that cannot be said. Takes no time even for a book."""
        return 0 if self._bound is None else self._bound.fewest_tokens(text)

    @cached_property
    def _bound(self) -> TextBound | None:
        try:
            return text_bound(self.backend)
        except Exception as error:  # tokenizers has no class of its own for parts that are written in Python
            if "cannot be serialized" not in str(error):
                raise
            return None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; bytes that are no UTF-8 become U+FFFD, ids without a token become nothing."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a longer text: with its leading space, special tokens written out."""
        text = self.decode([token_id], skip_special_tokens=False)
        token = self.backend.id_to_token(token_id) or ""
        return f" {text}" if token.startswith("▁") and not text.startswith(" ") else text

    def encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that write the given words, at the start of a text and after a space.

        Raises:
            InvalidRequestError: A word consists of characters the vocabulary cannot write.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            for text in dict.fromkeys((bare, f" {bare}")):
                token_ids = tuple(self.encode(text, add_special_tokens=False))
                if not token_ids:
                    raise InvalidRequestError(f"bad_words: the model's vocabulary cannot write {word!r}.")
                sequences[token_ids] = None
        return tuple(sequences)

    @cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Tokens such as ``<0x0A>`` that stand for single bytes; how one is read depends on its neighbours."""
        letter = self.backend.token_to_id("<0x41>")
        if letter is None or self.decode([letter]) != "A":
            return frozenset()
        found = (self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in found if token_id is not None)

    def vocabulary(self, size: int) -> TokenVocabulary:
        """What each token writes, for grammars.

        Args:
            size: Width of the model's logits; ids without a token write nothing.

        Raises:
            UnsupportedModelError: The tokenizer's tokens cannot be written as bytes.
        """
        found = token_bytes(self.backend)
        return TokenVocabulary(
            tokens=tuple(found.get(token_id, b"") for token_id in range(size)),
            special_token_ids=frozenset(token_id for token_id in self.special_token_ids if token_id < size),
            eos_token_ids=tuple(token_id for token_id in self.eos_token_ids if token_id < size),
            encode=partial(self.encode, add_special_tokens=False),
        )


def _resolve_source(source: str) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source.count("/") == 1 and not source.startswith((".", "~", "/")):
        return download_snapshot(source, weights=False)
    raise ModelNotFoundError(f"tokenizer: there is no file or folder {source!r}, and it is not a Hugging Face id.")


def _read_gguf(path: Path) -> dict[str, Any]:
    metadata = read_gguf_metadata(path)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    identifiers = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_SPECIAL.items()}
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    templates = {
        key.removeprefix(_GGUF_TEMPLATE).lstrip(".") or "default": value
        for key, value in metadata.items()
        if key == _GGUF_TEMPLATE or key.startswith(_GGUF_TEMPLATE + ".")
    }
    return {
        "backend": build_gguf_tokenizer(metadata),
        "eos_token_ids": [token for token in ends if token is not None],
        "bos_token_id": gguf_bos_token_id(metadata),
        "special_tokens_map": {
            f"{name}_token": tokens[token]
            for name, token in identifiers.items()
            if token is not None and token < len(tokens)
        },
        "chat_templates": templates,
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"{path} is not a tokenizer.json that can be read: {error}") from error
    return {"backend": _unbounded(backend)}


def _read_folder(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelNotFoundError(
            f"{path} has no tokenizer files (such as tokenizer.json); give tokenizer= a folder or Hugging Face id."
        )
    plain = read_plain_folder(path)
    if plain is not None:
        ends = [*plain["eos_token_ids"], *_configured_eos(path)]
        return {**plain, "backend": _unbounded(plain["backend"]), "eos_token_ids": ends}
    loaded = _load_with_transformers(path, trust_remote_code)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModelError(
            f"The tokenizer in {path} is a {type(loaded).__name__}, which has no fast form; add a tokenizer.json "
            "(transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder))."
        )
    own_end = [] if loaded.eos_token_id is None else [loaded.eos_token_id]
    return {
        "backend": _unbounded(backend),
        "eos_token_ids": [*own_end, *_configured_eos(path)],
        "bos_token_id": loaded.bos_token_id,
        "special_tokens_map": {name: str(token) for name, token in loaded.special_tokens_map.items()},
        "chat_templates": _templates(loaded.chat_template),
    }


def _load_with_transformers(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise all sorts, also plain Exception
        raise ModelLoadError(f"The tokenizer in {path} cannot be loaded: {error}") from error


def _configured_eos(path: Path) -> list[int]:
    """End-of-sequence ids that the model's generation settings name besides the tokenizer's own."""
    settings = path / "generation_config.json"
    if not settings.is_file():
        return []
    try:
        value = json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelLoadError(f"{settings} is damaged: {error}") from error
    found = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in found):
        raise ModelLoadError(f"{settings} is damaged: eos_token_id is {value!r}.")
    return found


def _templates(value: Any) -> dict[str, str]:
    if not value:
        return {}
    return {"default": value} if isinstance(value, str) else dict(value)


def _unbounded(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Without the padding and truncation that a tokenizer.json may carry from training."""
    backend.no_padding()
    backend.no_truncation()
    return backend
