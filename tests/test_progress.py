"""Progress: rates and remaining time against hand-worked figures, lines in a log file, silence where nothing is to be shown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from clusterft import progress
from clusterft.progress import PassProgress, training_progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_time_left_follows_tokens_where_they_are_known(clock: Clock) -> None:
    """A tenth of the rows but half of the tokens in 20 s: as long again."""
    bar = PassProgress("pass", 100, 8_000, shown=True)
    clock.now += 20
    assert bar.line() == "0 of 100 rows, 0 rows/s, 0 tokens/s, time left unknown"
    bar.advance(10, 4_000)
    assert bar.line() == "10 of 100 rows, 0.5 rows/s, 200 tokens/s, 20 s left"


def test_time_left_follows_rows_where_tokens_are_not_known(clock: Clock) -> None:
    bar = PassProgress("humaneval", 64, None, shown=True, unit="problems")
    clock.now += 8
    bar.advance(16)
    assert bar.line() == "16 of 64 problems, 2 problems/s, 24 s left"


def test_a_log_file_gets_a_line_every_half_minute_and_one_at_the_end(clock: Clock, capsys) -> None:
    with PassProgress("pass", 4, 40, shown=True) as bar:
        for seconds in (1, 30, 1, 8):  # 1, 31, 32, 40 s: the second is due, the last is the end
            clock.now += seconds
            bar.advance(1, 10)
    assert capsys.readouterr().err.splitlines() == [
        "pass: 2 of 4 rows, 0.065 rows/s, 0.65 tokens/s, 31 s left",
        "pass: 4 of 4 rows, 0.1 rows/s, 1 tokens/s, 0 s left",
    ]


def test_a_short_pass_leaves_a_log_file_alone(clock: Clock, capsys) -> None:
    with PassProgress("pass", 1, 10, shown=True) as bar:
        clock.now += 29
        bar.advance(1, 10)
    assert capsys.readouterr().err == ""


def test_other_ranks_are_silent(clock: Clock, capsys) -> None:
    with PassProgress("pass", 1, 10, shown=False) as bar:
        clock.now += 100
        bar.advance(1, 10)
    assert capsys.readouterr().err == ""


def test_a_pass_that_fails_does_not_say_that_it_is_done(clock: Clock, capsys) -> None:
    with pytest.raises(ValueError), PassProgress("pass", 2, 10, shown=True) as bar:
        clock.now += 31
        bar.advance(1, 5)
        raise ValueError
    assert capsys.readouterr().err.splitlines() == ["pass: 1 of 2 rows, 0.032 rows/s, 0.16 tokens/s, 31 s left"]


def test_training_tells_its_loss_and_counts_from_where_it_resumed(clock: Clock, capsys) -> None:
    """Ten rows of 20 tokens, two epochs, batch 4: resumed after step 2, 12 rows and 240 tokens are left."""
    seen: list[int] = []
    trainer = SimpleNamespace(epochs=2, global_batch=4)
    with training_progress([20] * 10, trainer, lambda line: seen.append(line["step"]), shown=True) as on_step:
        for step, loss in ((3, 1.25), (4, None)):
            clock.now += 40
            on_step({"step": step, "loss": loss, "rows": 4, "tokens": 80})
    assert seen == [3, 4]
    assert capsys.readouterr().err.splitlines() == [
        "training: 4 of 12 rows, 0.1 rows/s, 2 tokens/s, 80 s left, loss 1.250",
        "training: 8 of 12 rows, 0.1 rows/s, 2 tokens/s, 40 s left",
    ]
