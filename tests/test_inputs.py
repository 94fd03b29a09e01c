"""What the files of a configuration held, and whether a finished run may still stand for them."""

from pathlib import Path

from clusterft import inputs
from clusterft.inputs import changed_input, input_facts


def test_every_named_file_is_known_by_content_and_a_word_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "shards/x.csv", "model/config.json", "model/model.safetensors", "mbpp.jsonl", "chat/notes.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    config = {
        "data": {"path": ["a.jsonl", "shards"], "template": "chat", "name": "a"},  # `chat` is a folder here by accident
        "model": {"path": "model", "revision": None},
        "evaluators": {"mbpp": {"problems_file": str(tmp_path / "mbpp.jsonl"), "n": 3}},
        "runtime": {"runs_dir": "shards"},
    }
    config["data"]["path"] = "shards"
    facts = input_facts({**config, "selector": {"validation": ["a.jsonl", "gone.jsonl"]}})
    assert set(facts) == {"a.jsonl", "shards/x.csv", "model/config.json", "model/model.safetensors", str(tmp_path / "mbpp.jsonl")}
    assert facts["a.jsonl"]["bytes"] == 7 and changed_input(facts) == ""
    Path("a.jsonl").write_text("b.jsonl")  # as long as before
    assert changed_input(facts) == "a.jsonl has changed since this run was made from it"
    Path("a.jsonl").unlink()
    assert changed_input(facts) == ""
    Path("mbpp.jsonl").write_text("more than before")
    assert "mbpp.jsonl has changed" in changed_input(facts)


def test_large_files_are_known_by_size_and_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "WHOLE_BYTES", 100)
    monkeypatch.setattr(inputs, "END_BYTES", 10)
    path = tmp_path / "weights.safetensors"
    seen = set()
    for text in (b"a" * 101, b"b" + b"a" * 100, b"a" * 100 + b"b", b"a" * 102):
        path.write_bytes(text)
        (facts,) = input_facts({"model": {"path": str(path)}}).values()
        assert facts["sha256"].startswith("ends:")
        seen.add((facts["bytes"], facts["sha256"]))
    assert len(seen) == 4
