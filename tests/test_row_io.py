"""The rows that training reads are those that the selection stage wrote."""

import numpy as np
import pytest

from clusterft.records import Encoded
from clusterft.row_io import FILE, read_rows, write_rows
from clusterft.store import StoreError


def rows(n: int) -> list[Encoded]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 50, n)
    return [
        Encoded(f"id-{i}", rng.integers(0, 9, t).astype(np.int32), rng.integers(-100, 9, t).astype(np.int32), bool(i % 2))
        for i, t in enumerate(lengths)
    ]


@pytest.mark.parametrize("n", [1, 4096, 4097])
def test_rows_come_back_in_order_with_every_token(tmp_path, n):
    written = rows(n)
    write_rows(written, tmp_path)
    read = read_rows(tmp_path)
    assert [r.id for r in read] == [r.id for r in written]
    for one, other in zip(read, written, strict=True):
        assert np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.labels, other.labels)
        assert one.input_ids.dtype == np.int32 and one.truncated is other.truncated
        assert one.n_target == other.n_target


def test_the_same_rows_give_the_same_bytes_and_no_leftover(tmp_path):
    for name in ("a", "b"):
        write_rows(rows(100), tmp_path / name)
    assert (tmp_path / "a" / FILE).read_bytes() == (tmp_path / "b" / FILE).read_bytes()
    assert [p.name for p in (tmp_path / "a").iterdir()] == [FILE]


def test_a_missing_or_torn_file_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(StoreError, match="not finished; run the same command again"):
        read_rows(tmp_path)
    write_rows(rows(100), tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match="delete it and run the same command again"):
        read_rows(tmp_path)
