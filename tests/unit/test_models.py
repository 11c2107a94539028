from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, BertConfig, BertForSequenceClassification, BertModel, OPTConfig

from damage import flip_a_bit
from study.config.errors import UserError
from study.config.flags import RunConfig, Task, resolve_config
from study.config.places import REPOSITORY
from study.engine import setup as engine
from study.predictor.models import model_shape
from study.workloads.architecture import build_model, load_tokenizer, model_config, model_size
from study.workloads.initial import RECORD_NAME, InitialWeights, load_initial_model, materialize_initial_weights
from study.workloads.presets import DROPOUT_FIELDS, PRESETS

PARAMETERS = yaml.safe_load((REPOSITORY / "tests/data/published_parameters.yaml").read_text())
TINY = {"bert-imdb": "bert-tiny", "gpt-wikitext": "gpt-tiny"}


def select_task(model: str) -> Task:
    return "gpt-wikitext" if model not in PRESETS or PRESETS[model].family == "causal-lm" else "bert-imdb"


def run_config(model: str, task: Task | None = None, **values: Any) -> RunConfig:
    values = {"weights": "random", **values}
    return resolve_config(
        RunConfig(task=task or select_task(model), scale="laptop", model_name_or_path=model, **values), False
    )


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters_and_can_be_built_at_another_depth(name: str) -> None:
    models = (name, *(f"{name}-{depth}layers" for depth in (2, 3, 4)))
    published, two, three, four = (model_size(run_config(model, select_task(name))).parameters for model in models)
    assert name in (*TINY.values(), "llama-tiny", "bert-4k", "gpt-4k") or published == PARAMETERS[name]
    assert four - three == three - two > 0
    assert two + (model_config(run_config(name)).num_hidden_layers - 2) * (three - two) == published


# The sizes of a small model under the names that each family has for them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 2),
    **{"num_key_value_heads": 1, "head_dim": 16, "rotary_dim": 8, "attention_types": [[["global", "local"], 1]]},
}


@pytest.mark.parametrize("family", DROPOUT_FIELDS)
def test_dropout_0_leaves_none_in_any_family_and_dropout_on_takes_effect(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family, vocab_size=100, pad_token_id=0, **SIZES).save_pretrained(tmp_path)
    task: Task = "bert-imdb" if family in ("bert", "distilbert") else "gpt-wikitext"
    config = run_config(str(tmp_path), task, dropout=0.0)
    fields = {name for name in model_config(config).to_dict() if "drop" in name}
    assert fields == set(DROPOUT_FIELDS[family])

    tokens = torch.arange(1, 33).reshape(2, 16)

    def two_train_forwards(config: RunConfig) -> tuple[torch.nn.Module, bool]:
        torch.manual_seed(0)
        model = build_model(config).train()
        return model, torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits)

    for attention in ("eager", "sdpa"):
        model, agree = two_train_forwards(dataclasses.replace(config, attn_implementation=attention))
        assert agree
        assert not [part for part in model.modules() if isinstance(part, torch.nn.Dropout) and part.p > 0]
        _, agree = two_train_forwards(dataclasses.replace(config, attn_implementation=attention, dropout=0.5))
        assert not agree


def test_a_find_family_unknown_dropout_is_refused(tmp_path: Path) -> None:
    OPTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=64).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--dropout -1"):
        model_config(run_config(str(tmp_path), "gpt-wikitext", dropout=0.0))
    assert model_config(run_config(str(tmp_path), "gpt-wikitext", dropout=-1.0)).dropout == 0.1


def test_the_configuration_carries_the_run() -> None:
    bert = model_config(run_config("bert-large-uncased", dropout=-1.0))
    assert (bert.num_labels, bert.use_cache, bert.hidden_dropout_prob) == (2, False, 0.1)
    with torch.device("meta"):
        names = ("bert-tiny", "gpt-tiny", "gpt-neo-2.7b", "gpt-j-6b", "gemma-2-9b")
        models = [build_model(run_config(name, attn_implementation="sdpa")) for name in names]
        models.append(build_model(run_config("gpt-tiny", attn_implementation="eager")))
    # transformers has no sdpa for GPT-Neo and GPT-J, and sdpa has no softcapping for Gemma-2.
    assert [model.config._attn_implementation for model in models] == ["sdpa", "sdpa", *["eager"] * 4]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": "bert-larg-uncased", "task": "bert-imdb"}, ["unknown model", "bert-large-uncased", "owner/name"]),
        ({"model": "./nowhere"}, ["unknown model './nowhere'", "folder"]),
        ({"model": "bert-tiny", "task": "gpt-wikitext"}, ["does not fit --task gpt-wikitext", "gpt2"]),
        ({"model": "bert-tiny", "seq_length": 4097}, ["--seq_length 4097", "4096 or less"]),
        ({"model": "gpt-neo-2.7b", "seq_length": 4096}, ["--seq_length 4096", "2048 or less"]),
        ({"model": "gpt-tiny", "weights": "pretrained"}, ["no weights are published", "--weights random"]),
        ({"model": "gpt-tiny", "attn_implementation": "paged"}, ["--attn_implementation paged", "sdpa_causal"]),
        ({"model": "bert-tiny", "task": "bert-imdb", "attn_implementation": "sdpa_causal"}, ["bidirectional"]),
        ({"model": "gpt-neo-2.7b", "attn_implementation": "sdpa_causal"}, ["has a custom attention"]),
        ({"model": "gemma-2-9b", "attn_implementation": "sdpa_causal"}, ["caps its attention scores"]),
        ({"model": "gpt-tiny", "attn_implementation": "flash_attention_2"}, ["flash_attention_2", "use sdpa"]),
    ],
)
def test_a_wrong_model_is_refused_with_its_fix(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        model_config(run_config(**flags))
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(("attention", "is_masked"), [("sdpa", True), ("sdpa_causal", False)])
def test_torch_compile_costs_sdpa_its_causal_kernels_unless_no_mask_is_ever_built(attention, is_masked):
    kernel_calls: set[tuple[bool, bool]] = set()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                kernel_calls.add((node.kwargs["attn_mask"] is not None, node.kwargs["is_causal"]))
        return graph.forward

    tokens, models = torch.arange(64).reshape(2, 32), []
    for kernel in (attention, "sdpa"):
        torch.manual_seed(0)
        models.append(build_model(run_config("gpt-tiny", dropout=0.0, attn_implementation=kernel)))
    torch._dynamo.reset()
    loss = torch.compile(models[0], backend=backend)(input_ids=tokens, labels=tokens).loss
    torch._dynamo.reset()
    assert kernel_calls == {(is_masked, not is_masked)}
    torch.testing.assert_close(loss, models[1](input_ids=tokens, labels=tokens).loss)


def hash_weights(weights: InitialWeights) -> str:
    return hashlib.sha256((weights.path / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("task", TINY)
def test_initial_weights_depend_on_the_seed_and_on_nothing_around_them(task: str, tmp_path: Path) -> None:
    config = run_config(TINY[task])
    first = materialize_initial_weights(config, tmp_path / "a")
    assert first.sha256 == hash_weights(first)
    threads = torch.get_num_threads()
    torch.manual_seed(123)
    torch.set_num_threads(2 if threads == 1 else 1)
    state = torch.get_rng_state()
    try:
        with torch.device("meta"):
            second = materialize_initial_weights(dataclasses.replace(config, dropout=0.3), tmp_path / "b")
    finally:
        torch.set_num_threads(threads)
    assert (second.sha256, second.path.name) == (first.sha256, first.path.name)
    assert torch.equal(state, torch.get_rng_state())
    assert materialize_initial_weights(dataclasses.replace(config, seed=43), tmp_path / "a").sha256 != first.sha256
    assert materialize_initial_weights(config, tmp_path / "a") == first


@pytest.mark.parametrize("task", TINY)
def test_every_arm_loads_the_same_tensors_of_its_names_and_its_own_dropout(task: str, tmp_path: Path) -> None:
    def dropouts(model: torch.nn.Module) -> set[float]:
        return {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)}

    config = run_config(TINY[task], dropout=0.0)
    initial = materialize_initial_weights(config, tmp_path)
    saved = load_file(initial.path / "model.safetensors")
    state = torch.get_rng_state()
    model = load_initial_model(config, initial)
    assert torch.equal(state, torch.get_rng_state())
    assert {name: tensor.dtype for name, tensor in model.named_parameters()} == dict.fromkeys(saved, torch.float32)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.named_parameters())
    for dropout, expected in ((0.0, {0.0}), (0.25, {0.25}), (-1.0, {0.1})):
        assert dropouts(load_initial_model(dataclasses.replace(config, dropout=dropout), initial)) == expected
    # The loaded tensors may be a view of the file, which training must not change.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert hash_weights(initial) == initial.sha256
    # Weights of other names than the model's are not loaded.
    name = min(saved)
    saved["extra"] = saved.pop(name)
    save_file(saved, initial.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=name):
        load_initial_model(config, initial)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("model.safetensors", flip_a_bit, "model.safetensors was changed"),
        ("config.json", Path.unlink, "config.json"),
        (RECORD_NAME, lambda file: file.write_text(file.read_text().replace("0", "1", 1)), "was changed"),
    ],
)
def test_damaged_weights_are_refused_by_name(name, damage, words, tmp_path):
    config = run_config("bert-tiny")
    initial = materialize_initial_weights(config, tmp_path)
    damage(initial.path / name)
    with pytest.raises(UserError, match=f"weights in {initial.path} are damaged.*{words}.*delete the folder"):
        materialize_initial_weights(config, tmp_path)


def local_bert(folder: Path) -> Path:
    torch.manual_seed(7)
    BertModel(BertConfig(vocab_size=100, **SIZES)).save_pretrained(folder)
    return folder


def test_pretrained_weights_come_from_a_folder_and_the_head_from_the_seed(tmp_path: Path) -> None:
    source = local_bert(tmp_path / "source")
    config = run_config(str(source), "bert-imdb", weights="pretrained")
    body = load_file(source / "model.safetensors")
    sets = []
    for turn, seed in enumerate((42, 43, 42)):
        drawn = materialize_initial_weights(dataclasses.replace(config, seed=seed), tmp_path / f"cache{turn}")
        sets.append(load_file(drawn.path / "model.safetensors"))
    for weights in sets:
        assert all(torch.equal(weights[f"bert.{name}"], tensor) for name, tensor in body.items())
    heads = [weights["classifier.weight"] for weights in sets]
    assert (torch.equal(heads[0], heads[1]), torch.equal(heads[0], heads[2])) == (False, True)
    # A changed file of the same size and time is another model.
    file = source / "model.safetensors"
    before = file.stat()
    flip_a_bit(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert materialize_initial_weights(config, tmp_path / "cache2").path != drawn.path


def test_a_folder_that_cannot_be_trained_from_is_refused(tmp_path: Path) -> None:
    def refused(folder: Path, words: str) -> None:
        with pytest.raises(UserError, match=words):
            materialize_initial_weights(run_config(str(folder), "bert-imdb", weights="pretrained"), tmp_path / "cache")

    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"no config\.json")
    source = local_bert(tmp_path / "source")
    weights = source / "model.safetensors"
    tensors, content = load_file(weights), weights.read_bytes()
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    refused(source, r"lacks weights: bert\.encoder\.layer\.1\.output\.dense\.weight")
    weights.write_bytes(content[: len(content) // 2])
    refused(source, "cannot load the weights")
    weights.rename(source / "pytorch_model.bin")
    refused(source, "pickle files are not loaded")
    three = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=3, **SIZES))
    three.save_pretrained(tmp_path / "three")
    refused(tmp_path / "three", "cannot load the weights")
    assert not [path for path in (tmp_path / "cache" / "initial_weights").iterdir() if path.is_dir()]


def test_a_configuration_that_nothing_can_be_trained_from_is_refused(tmp_path: Path) -> None:
    file = local_bert(tmp_path / "source") / "config.json"
    described = json.loads(file.read_text())
    for key, value, words in (
        # transformers would load these as if they were not quantized.
        ("quantization_config", {"quant_method": "fp8"}, "quantized weights"),
        ("hidden_act", "nonsense", "cannot be built .*nonsense"),
        ("num_attention_heads", 5, "cannot be built .*attention heads"),
    ):
        file.write_text(json.dumps(described | {key: value}))
        for weights in ("pretrained", "random"):
            config = run_config(str(file.parent), "bert-imdb", weights=weights)
            with pytest.raises(UserError, match=words):
                materialize_initial_weights(config, tmp_path / "cache")


def test_a_tokenizer_has_a_vocabulary_that_fits_and_a_pad_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def load(number: int, end: str | None = "<end>") -> Any:
        vocabulary = {"<end>": 0} | {f"w{index}": index for index in range(1, number)}
        folder, tokenizer = tmp_path / f"words{number}", Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
        return load_tokenizer(run_config("gpt-tiny", tokenizer_name=str(folder)))

    assert (len(load(50)), load(50).pad_token) == (50, "<end>")
    with pytest.raises(UserError, match="5000 entries"):
        load(5000)
    with pytest.raises(UserError, match="neither a pad token"):
        load(60, end=None)
    with pytest.raises(UserError, match="--tokenizer_name"):
        load_tokenizer(run_config("bert-tiny"))
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="no tokenizer vocabulary"):
        load_tokenizer(run_config("gpt-tiny", tokenizer_name=str(tmp_path / "bare")))


class SmallHub(http.server.BaseHTTPRequestHandler):
    """Hub server with three answers: a missing model, a gated one, and one with pickle files only."""

    def do_GET(self) -> None:
        files = {"id": "o/m", "siblings": [{"rfilename": "config.json"}, {"rfilename": "pytorch_model.bin"}]}
        status, code, body = 404, "EntryNotFound", ""
        if "/missing" in self.path:
            code = "RepoNotFound"
        elif "/gated" in self.path:
            status, code = 403, "GatedRepo"
        elif self.path.startswith("/api/models/") and "/tree/" not in self.path:
            status, code, body = 200, "", json.dumps(files)
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body.encode())

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def small_hub() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SmallHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_refusals_of_the_hub_are_reported_and_so_is_an_unreachable_one_within_seconds(small_hub, tmp_path, monkeypatch):
    address = f"http://127.0.0.1:{small_hub.server_port}"
    # huggingface_hub reads them from the environment at its import.
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    values = {"ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(tmp_path)}
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)

    def draw(config: RunConfig) -> InitialWeights:
        return materialize_initial_weights(config, tmp_path)

    def refuses(says: str, load: Any, model: str, task: Task = "gpt-wikitext", weights: str = "random") -> None:
        started = time.monotonic()
        with pytest.raises(UserError, match=says):
            load(run_config(model, task, weights=weights))
        assert time.monotonic() - started < 15

    refuses("the hub has no model owner/missing", model_config, "owner/missing")
    refuses("hf auth login", model_config, "owner/gated")
    refuses("publishes no safetensors", draw, "gpt-j-6b", weights="pretrained")
    small_hub.shutdown()
    small_hub.server_close()
    refuses("the hub cannot be reached.*--weights random", model_config, "owner/name")
    # A prediction loads no weights, and names the preset that is meant.
    with pytest.raises(UserError, match=r"cannot be reached.*did you mean mistral-7b-v0.2 or.*a folder with"):
        model_shape("owner/Mistral-7B-v0.4", ask_hub=True)
    refuses("the hub cannot be reached.*--tokenizer_name", load_tokenizer, "bert-base-uncased", "bert-imdb")
    refuses("the hub cannot be reached.*--weights random", draw, "gpt2", weights="pretrained")
    assert not [path for path in (tmp_path / "initial_weights").iterdir() if path.is_dir()]


@pytest.mark.parametrize("task", TINY)
def test_a_compiled_forward_pass_is_one_graph(task: Task, accelerator: Accelerator, tmp_path: Path) -> None:
    config = run_config(TINY[task], task, torch_compile=True)
    model = load_initial_model(config, materialize_initial_weights(config, tmp_path))
    engine.prepare(accelerator, model, torch.optim.AdamW(model.parameters()), config)
    tokens = torch.ones(2, 8, dtype=torch.long)
    labels = tokens if task == "gpt-wikitext" else torch.zeros(2, dtype=torch.long)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(model)(input_ids=tokens, attention_mask=tokens, labels=labels)
    torch._dynamo.reset()
    assert explained.graph_count == 1, explained.break_reasons


def test_weights_that_the_disk_cannot_hold_are_refused_before_they_are_drawn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gpt-1t needs 4234 GB, and .* free"):
        materialize_initial_weights(run_config("gpt-1t"), tmp_path)
