"""Models as objects: sharing, copying, pickling, LangChain's serialization, and closing."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumpd, dumps, load, loads
from langchain_core.runnables import ConfigurableField
from langchain_fakes import FakeRegistry

from langchain_pagedlc import VLLM, VLLMChat
from pagedlc_engine.errors import EngineClosedError

OPTIONS: dict[str, Any] = {
    "model": "some/model",
    "temperature": 0.5,
    "stop": ["x"],
    "logit_bias": {5: 1.0},
    "block_size": 32,
    "chat_template": "{{ x }}",
    "seed": 3,
}


@pytest.fixture(params=[VLLM, VLLMChat])
def model_class(request: pytest.FixtureRequest, registry: FakeRegistry) -> Any:
    return request.param


def test_models_with_the_same_name_and_options_share_an_engine(registry: FakeRegistry) -> None:
    models = [VLLM(block_size=32), VLLM(block_size=32, temperature=0), VLLMChat(block_size=32)]
    assert len(registry.engines) == 1
    assert len({id(model.llm) for model in models}) == 1
    VLLM(block_size=16)
    assert len(registry.engines) == 2


def test_weights_are_loaded_on_request_only(model_class: Any, registry: FakeRegistry) -> None:
    model = model_class()
    assert registry.engine.loads == 0
    assert model.load() is model
    assert registry.engine.loads == 1


def test_closing_gives_the_engine_back(model_class: Any, registry: FakeRegistry) -> None:
    first, second = model_class(), model_class()
    first.close()
    first.close()
    with pytest.raises(EngineClosedError):
        first.invoke("Hi")
    second.invoke("Hi")
    assert registry.engine.alive
    second.close()
    gc.collect()
    assert not registry.engine.alive


def test_a_closed_model_stays_closed(model_class: Any, registry: FakeRegistry) -> None:
    model = model_class(cache=InMemoryCache())
    model.close()
    for closed in (model, copy.copy(model)):
        with pytest.raises(EngineClosedError):
            closed.invoke("Hi")


def test_a_forgotten_model_gives_the_engine_back(model_class: Any, registry: FakeRegistry) -> None:
    model = model_class()
    model.invoke("Hi")
    del model
    gc.collect()
    assert not registry.engine.alive


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_langchain_serialization(model_class: Any, registry: FakeRegistry) -> None:
    model = model_class(**OPTIONS)
    written = dumpd(model)
    assert written["type"] == "constructor"
    assert written["id"][0] == "langchain_pagedlc"
    assert written["kwargs"] == {
        **{name: OPTIONS[name] for name in ("model", "temperature", "stop", "logit_bias", "chat_template", "seed")},
        "engine_options": {"block_size": 32},
        **{name: written["kwargs"][name] for name in written["kwargs"].keys() - OPTIONS.keys() - {"engine_options"}},
    }
    names: dict[str, Any] = {"valid_namespaces": ["langchain_pagedlc"], "allowed_objects": [model_class]}
    for read in (load(written, **names), loads(dumps(model), **names), load(json.loads(json.dumps(written)), **names)):
        assert read == model
        assert read.asdict() == model.asdict()
    assert registry.engine.loads == 0


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, "model_copy"])
def test_copies_share_the_engine_but_not_the_hold(model_class: Any, registry: FakeRegistry, way: Any) -> None:
    model = model_class(**OPTIONS)
    model.invoke("Hi")
    twin = model.model_copy(update={"temperature": 0.0}) if way == "model_copy" else way(model)
    model.close()
    twin.invoke("Hi")
    assert [call.params.seed for call in registry.engine.calls] == [3, 3]
    if way == "model_copy":
        assert [call.params.temperature for call in registry.engine.calls] == [0.5, 0.0]
    else:
        assert twin == model


def test_a_copy_with_another_model_asks_that_model(model_class: Any, registry: FakeRegistry) -> None:
    model = model_class(model="one")
    twin = model.model_copy(update={"model": "other"})
    twin.invoke("Hi")
    model.invoke("Hi")
    assert [llm.llm.model_name for llm in (model, twin)] == ["one", "other"]
    assert [len(engine.calls) for engine in registry.engines.values()] == [1, 1]


def test_a_pickle_holds_names_not_weights(model_class: Any, registry: FakeRegistry) -> None:
    model = model_class(**OPTIONS)
    model.invoke("Hi")
    written = pickle.dumps(model)
    assert b"FakeLLM" not in written
    twin = pickle.loads(written)
    assert twin == model
    twin.invoke("Hi")
    assert len(registry.engines) == 1
    assert [call.params.seed for call in registry.engine.calls] == [3, 3]


def test_a_chain_with_a_model_can_be_copied(model_class: Any, registry: FakeRegistry) -> None:
    chain = model_class() | (lambda answer: answer)
    copy.deepcopy(chain).invoke("Hi")
    assert len(registry.engines) == 1


def test_configurable_fields(model_class: Any, registry: FakeRegistry) -> None:
    model = model_class(block_size=32).configurable_fields(temperature=ConfigurableField(id="heat"))
    model.invoke("Hi", config={"configurable": {"heat": 0.125}})
    assert registry.engine.calls[0].params.temperature == 0.125


def test_what_identifies_a_model_is_all_that_shapes_its_answers(model_class: Any, registry: FakeRegistry) -> None:
    base = model_class(**OPTIONS).asdict()
    assert base["model"] == "some/model"
    assert base["engine_options"] == {"block_size": 32}
    for name, value in {"temperature": 0.1, "block_size": 16, "chat_template": "{{ y }}", "top_k": 3}.items():
        assert model_class(**{**OPTIONS, name: value}).asdict() != base


def test_repr_shows_what_was_set(model_class: Any, registry: FakeRegistry) -> None:
    shown = repr(model_class(temperature=0.5))
    assert "temperature=0.5" in shown
    assert "top_p" not in shown
