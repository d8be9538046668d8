"""Tokenizer folders read without transformers, whose import takes seconds, where transformers would add nothing.

For most models ``tokenizer.json`` says everything about how text becomes tokens, and ``tokenizer_config.json`` names
the special tokens and holds the chat template. Where a folder asks for more than that, the answer here is ``None``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from pagedlc_engine.errors import ModelLoadError

__all__ = ["has_code", "read_plain_folder"]

#: Classes that take ``tokenizer.json`` as it is.
_QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", *_QWEN_CLASSES)
#: Settings that, when on, make transformers change what ``tokenizer.json`` says.
_CHANGES = ("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens", "auto_map", "from_slow")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
_LISTED = ("additional_special_tokens", "extra_special_tokens")


def read_plain_folder(path: Path) -> dict[str, Any] | None:
    """A folder's tokenizer as keywords of :class:`pagedlc.tokenizer.Tokenizer`; ``None`` if transformers is needed.

    Raises:
        ModelLoadError: ``tokenizer.json`` is damaged.
    """
    try:
        return _read(path, _json(path / "tokenizer_config.json"))
    except (TypeError, KeyError, AttributeError, ValueError):  # a configuration of another shape
        return None


def has_code(source: Path) -> bool:
    """Whether a tokenizer names Python code that could run where ``trust_remote_code`` allows it."""
    return any(_json(source / name).get("auto_map") for name in ("tokenizer_config.json", "config.json"))


def _read(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = config.get("tokenizer_class")
    if kind not in _PLAIN_CLASSES or any(config.get(name) for name in _CHANGES):
        return None
    # What stands nowhere has a value in these classes.
    if kind in _QWEN_CLASSES and not all(name in config for name in ("eos_token", "unk_token", "pad_token")):
        return None
    # Older files that have a say where the configuration does not describe the added tokens.
    if "added_tokens_decoder" not in config and any((path / name).is_file() for name in _OLDER_FILES):
        return None
    # transformers mends the word splitting of some of Mistral's files.
    if not (path / "tokenizer.json").is_file() or "stral" in str(_json(path / "config.json").get("model_type")):
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"The tokenizer in {path} cannot be loaded: {error}") from error
    named = {name: _text(config[name]) for name in _NAMED if config.get(name)}
    listed = [_text(token) for name in _LISTED for token in _values(config.get(name))]
    if not _all_known(backend, [*named.values(), *listed], config.get("added_tokens_decoder")):
        return None
    ids = {name: backend.token_to_id(token) for name, token in named.items()}
    return {
        "backend": backend,
        "eos_token_ids": [ids["eos_token"]] if "eos_token" in ids else [],
        "bos_token_id": ids.get("bos_token"),
        "special_tokens_map": named,
        "chat_templates": _templates(path, config.get("chat_template")),
    }


def _json(file: Path) -> dict[str, Any]:
    """What a file holds, if that is a JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _values(tokens: Any) -> list[Any]:
    return list(tokens.values() if isinstance(tokens, dict) else tokens or [])


def _all_known(backend: tokenizers.Tokenizer, special: list[str], described: Any) -> bool:
    """Whether ``tokenizer.json`` has all special tokens, and every added token just as the configuration has it."""
    added = backend.get_added_tokens_decoder()
    if not set(special) <= {token.content for token in added.values() if token.special}:
        return False
    for number, wanted in dict(described or {}).items():
        token = added.get(int(number))
        if token is None or any(
            getattr(token, name, None) != value for name, value in wanted.items() if name[0] != "_"
        ):
            return False
    return True


def _templates(path: Path, configured: Any) -> dict[str, str]:
    """Chat templates by name: files of their own go before those in the configuration."""
    found = {file.stem: file.read_text(encoding="utf-8") for file in path.glob("additional_chat_templates/*.jinja")}
    default = path / "chat_template.jinja"
    if default.is_file():
        found["default"] = default.read_text(encoding="utf-8")
    if found or not configured:
        return found
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, dict):
        return {str(name): str(template) for name, template in configured.items()}
    return {item["name"]: item["template"] for item in configured}
