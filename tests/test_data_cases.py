"""Cases 01, 02 and 04: every numbered statement of their case.md."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import warnings
from itertools import permutations
from pathlib import Path

import pytest
from data_configs import case, files_config

from clusterft.data import load_pool
from clusterft.sources import DataError


class TestEmptyAndMissingAnswers:
    folder, expected = case("01")

    def load(self, **changes):
        return load_pool(files_config(str(self.folder / "train.jsonl"), **changes))

    def test_kept_and_rejected_lines_with_their_reasons(self) -> None:
        pools = self.load()
        assert [e.line for e in pools.train.examples] == self.expected["valid_lines"]
        by_reason: dict[str, list[int]] = {}
        for rejection in pools.train.rejected:
            by_reason.setdefault(rejection.reason, []).append(rejection.line)
        assert by_reason == self.expected["reasons"]
        assert pools.report.rows_read == self.expected["records"] == 23
        assert pools.report.rows_kept == 13

    def test_zero_and_false_are_answers(self) -> None:
        kept = {e.line: e.response for e in self.load().train.examples}
        assert (kept[16], kept[17]) == ("0", "false")

    def test_null_empty_and_absent_input_are_the_same_row(self) -> None:
        rows = [e for e in self.load().train.examples if e.line in (19, 20, 21)]
        assert {(e.prompt, e.input) for e in rows} == {("Spell the word nurse backwards.", "")}
        assert [e.id for e in rows] == [rows[0].id, rows[0].id + "-2", rows[0].id + "-3"]

    def test_blank_line_is_no_record(self) -> None:
        pools = self.load()
        seen = {e.line for e in pools.train.examples} | {r.line for r in pools.train.rejected}
        assert seen == set(range(1, 25)) - {15}

    def test_duplicates_are_counted_and_kept(self) -> None:
        report = self.load().report
        assert report.duplicates == 3
        assert report.rows_kept - report.duplicates == self.expected["unique_valid_after_exact_dedup"]
        pairs = [(first[1], again[1]) for again, first in report.duplicate_lines]
        assert pairs == [(1, 8), (19, 20), (19, 21)]

    def test_placeholder_answer_is_kept_and_named(self) -> None:
        report = self.load().report
        assert [line for _, line in report.noted["placeholder_response"]] == [13]
        assert any("placeholder_response (kept): 1 (train.jsonl line 13)" in line for line in report.lines())

    def test_text_is_kept_as_it_is(self) -> None:
        kept = {e.line: e for e in self.load().train.examples}
        assert kept[22].prompt == "Give the plural of diagnosis."
        assert kept[23].prompt == "Sum the list.   "
        assert kept[24].response == "def f():\n    pass"

    def test_strict_names_the_first_bad_line(self) -> None:
        with pytest.raises(DataError, match=r"train\.jsonl line 3: empty_response"):
            load_pool(files_config(str(self.folder / "train.jsonl")), strict=True)

    def test_nothing_left_is_one_sentence(self, tmp_path: Path) -> None:
        lines = (self.folder / "train.jsonl").read_bytes().split(b"\n")
        bad = tmp_path / "bad.jsonl"
        bad.write_bytes(b"\n".join(lines[i - 1] for i in self.expected["rejected_lines"]))
        with pytest.raises(DataError, match=r"none of the 10 rows can be used \(3 x empty_response") as caught:
            load_pool(files_config(str(bad)))
        assert "\n" not in str(caught.value)

    def test_summary_has_one_line_a_reason(self) -> None:
        lines = self.load().report.lines()
        assert sum("empty_response" in line for line in lines) == 1
        assert "  empty_response: 3 (train.jsonl line 3, train.jsonl line 4, train.jsonl line 18)" in lines
        assert json.loads(json.dumps(self.load().report.to_json()))["rejected"]["empty_response"] == 3


class TestShardsWithDriftingColumns:
    folder, expected = case("02")

    def shards(self) -> list[str]:
        return [str(p) for p in sorted(self.folder.glob("part-*.jsonl"))]

    def test_eight_rows_in_order(self) -> None:
        pools = load_pool(files_config(self.shards()))
        assert len(pools.train) == 8 and not pools.train.rejected
        found = [(Path(e.source).name, e.line, e.response) for e in pools.train.examples]
        assert found == [(r["file"], r["line"], r["output"]) for r in self.expected["per_row"]]

    def test_a_folder_means_its_files_by_name(self, tmp_path: Path) -> None:
        for path in self.shards():
            shutil.copy(path, tmp_path)
        named = load_pool(files_config(self.shards())).train
        assert load_pool(files_config(str(tmp_path))).train.ids == named.ids

    def test_dates_stay_text(self) -> None:
        answer = load_pool(files_config(self.shards())).train.examples[6].response
        assert answer == "2024-02-29T00:00:00" and len(answer) == 19

    def test_source_lines_come_back_byte_for_byte(self) -> None:
        pools = load_pool(files_config(self.shards()))
        lines = pools.report.source_lines(reversed(pools.train.examples))
        hashes = [hashlib.sha256(line).hexdigest() for line in reversed(lines)]
        assert hashes == [r["sha256_of_line"] for r in self.expected["per_row"]]
        one = pools.report.source_line_bytes(pools.train.examples[5])
        assert hashlib.sha256(one).hexdigest() == self.expected["per_row"][5]["sha256_of_line"]

    def test_order_of_shards_changes_only_the_order_of_rows(self) -> None:
        reference = load_pool(files_config(self.shards(), holdout_rows=2, max_rows=4))
        for order in list(permutations(self.shards()))[::5]:
            pools = load_pool(files_config(list(order), holdout_rows=2, max_rows=4))
            assert set(pools.train.ids) == set(reference.train.ids)
            assert set(pools.heldout.ids) == set(reference.heldout.ids)
            assert pools.train.fingerprint == reference.train.fingerprint


class TestConversations:
    folder, expected = case("04")

    def load(self):
        return load_pool(files_config(str(self.folder / "chat.jsonl")))

    def test_kept_rejected_and_supervised_turns(self) -> None:
        pools = self.load()
        reasons = {r.line: r.reason for r in pools.train.rejected}
        kept = {e.line: e for e in pools.train.examples}
        for row in self.expected["per_line"]:
            line = row["line"]
            if row["status"] == "reject":
                assert reasons[line] == row["reason"]
                continue
            example = kept[line]
            targets = [t.text for t in example.turns if t.supervised] or [example.response]
            assert targets == row["supervised"], line
            if "system" in row:
                assert example.turns[0].role == "system" and example.turns[0].text == row["system"]
        assert (len(kept), len(reasons)) == (self.expected["ok"], self.expected["rejected"]) == (8, 6)
        assert pools.report.supervised_turns == self.expected["supervised_turns"] == 9

    def test_neighbours_are_joined_by_one_newline(self) -> None:
        kept = {e.line: e for e in self.load().train.examples}
        assert kept[3].prompt == "First line of my question.\nSecond line of it." and kept[3].turns == ()
        assert [t.text for t in kept[4].turns] == ["Q1", "A1 part one.\nA1 part two.", "Q2", "A2"]

    def test_empty_middle_answer_is_context_and_trailing_question_is_cut(self) -> None:
        kept = {e.line: e for e in self.load().train.examples}
        assert [(t.role, t.text, t.supervised) for t in kept[9].turns] == [
            ("user", "Q1", False),
            ("assistant", "", False),
            ("user", "Q2", False),
            ("assistant", "A2", True),
        ]
        assert (kept[5].prompt, kept[5].response, kept[5].turns) == ("Q1", "A1", ())

    def test_summary_prints_supervised_turns_and_no_row_warns(self, caplog, capsys) -> None:
        with warnings.catch_warnings(), caplog.at_level(logging.DEBUG):
            warnings.simplefilter("error")
            report = self.load().report
        assert not caplog.records and capsys.readouterr() == ("", "")
        assert "9 supervised turns" in report.lines()[0]
        assert "sharegpt (7 rows), messages (1 rows)" in report.lines()[1]
