"""Folders are read without transformers where that changes nothing, and as transformers reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pagedlc.models import resolve_model
from pagedlc.tokenizer import Tokenizer
from pagedlc.tokenizer_folder import read_plain_folder
from pagedlc_engine.errors import ModelLoadError

TEXTS = ["Hello, world! It's 12345.", "<|im_start|>user\nÜber 你好 👩‍👩‍👧‍👦<|im_end|>\n", "  two  spaces  "]
PLAIN: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
    "chat_template": "{{ messages[0]['content'] }}",
    "add_bos_token": False,
}


@pytest.fixture
def folder(tmp_path: Path, smollm: Tokenizer) -> Path:
    smollm.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def configure(folder: Path, **changes: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({**PLAIN, **changes}))
    return folder


def with_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from a file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")


def described(smollm: Tokenizer) -> dict[str, Any]:
    """The added tokens as a ``tokenizer_config.json`` describes them."""
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = smollm.backend.get_added_tokens_decoder()
    return {str(number): {flag: getattr(token, flag) for flag in flags} for number, token in added.items()}


@pytest.mark.parametrize("case", ["as it is", "template files", "named templates", "added tokens", "lists"])
def test_the_plain_reading_is_that_of_transformers(folder: Path, smollm: Tokenizer, case: str) -> None:
    changes: dict[str, Any] = {}
    if case == "template files":
        with_templates(folder)
    elif case == "named templates":
        changes["chat_template"] = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    elif case == "added tokens":
        changes["added_tokens_decoder"] = described(smollm)
    elif case == "lists":
        changes["additional_special_tokens"] = ["<|im_start|>", "<|endoftext|>"]
    configure(folder, **changes)
    assert read_plain_folder(folder) is not None
    found = Tokenizer.from_files(resolve_model(folder))

    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(str(folder))
    assert [found.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
    assert found.eos_token_ids == (expected.eos_token_id,)
    assert found.bos_token_id == expected.bos_token_id
    templates = expected.chat_template
    assert found.chat_templates == ({"default": templates} if isinstance(templates, str) else templates)
    for name in ("bos_token", "eos_token"):
        assert found.special_tokens_map[name] == str(expected.special_tokens_map[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"add_bos_token": True},
        {"eos_token": "<|a new token|>"},
        {"additional_special_tokens": ["<|another|>"]},
        {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": False}}},
        {"added_tokens_decoder": {"99999": {"content": "<|more|>", "special": True}}},
        {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"chat_template": 5},
        {"eos_token": {"text": "</s>"}},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"1": "<|im_start|>"}},
    ],
)
def test_what_asks_for_more_is_left_to_transformers(folder: Path, changes: dict[str, Any]) -> None:
    assert read_plain_folder(configure(folder, **changes)) is None


def test_an_end_token_that_only_an_older_file_names(folder: Path) -> None:
    settings = {name: value for name, value in PLAIN.items() if name != "eos_token"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert Tokenizer.from_files(resolve_model(folder)).eos_token_ids == (2,)


@pytest.mark.parametrize("value", ["</s>", ["2"], {"a": 1}])
def test_generation_settings_without_sense_are_named(folder: Path, value: Any) -> None:
    (configure(folder) / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelLoadError, match="generation_config"):
        Tokenizer.from_files(resolve_model(folder))


def test_mistrals_files_are_left_to_transformers(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert read_plain_folder(configure(folder)) is None


def test_transformers_is_not_imported_for_a_plain_folder(folder: Path) -> None:
    configure(folder)
    script = (
        "import sys; from pathlib import Path; from pagedlc.tokenizer import Tokenizer\n"
        "from pagedlc.models import resolve_model\n"
        f"tokenizer = Tokenizer.from_files(resolve_model({str(folder)!r}))\n"
        "assert tokenizer.encode('Hello')\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_padding_in_the_file_is_not_applied(folder: Path, smollm: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(smollm.backend.to_str())
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_files(resolve_model(configure(folder))).encode("Hello")) < 5
