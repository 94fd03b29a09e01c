"""`select`: a subset of a person's data in one call, through the same stages as `run.py`.

    select(data, model, keep=0.3) ► compose ► preflight ► prepare ► features ► choose ► folder with everything a trainer needs

In: data files, a model, how much to keep. Out: `SelectResult`, and on disk the folder that `clusterft.export` describes. Work
that was interrupted goes on when the same call is repeated; a folder of another selection is never touched.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from clusterft.composing import Request, command_of, compose_request
from clusterft.config import load_frozen
from clusterft.exact import floor_product
from clusterft.export import HEADER, file_facts, read_header, write_folder
from clusterft.overrides import UserError
from clusterft.records import Encoded, Pool, Selection
from clusterft.seeding import generator
from clusterft.selection_io import read_selection
from clusterft.store import RunStore, run_id


@dataclass(frozen=True)
class TrainingData:
    """A selection for a training loop of your own: m rows as tokens, their clusters and weights, aligned.

    rows  records.Encoded: input_ids and labels (t,), prompt masked
    """

    cfg: DictConfig
    rows: tuple[Encoded, ...]
    tokenizer: Any
    selection: Selection

    @property
    def clusters(self) -> np.ndarray | None:
        return self.selection.clusters

    @property
    def weights(self) -> np.ndarray | None:
        return self.selection.weights

    def collate(self, rows: Sequence[Encoded]) -> dict[str, Any]:
        """input_ids, attention_mask and labels (n, t), padded on the right."""
        from clusterft.collate import collate, pad_id_of

        return collate(rows, pad_id_of(self.tokenizer))

    def model(self) -> Any:
        """The model that the selection was made with, as transformers loads it."""
        from clusterft import stages

        return stages.model_for(self.cfg, device=self.cfg.runtime.device)


@dataclass(frozen=True)
class SelectResult:
    """A finished selection.

    folder     where everything lies
    run_dir    the run directory below it, which training and evaluation continue
    selection  ids, clusters, weights, distances
    header     what header.json holds
    """

    folder: Path
    run_dir: Path
    selection: Selection
    header: Mapping[str, Any]

    def dataset(self) -> Any:
        """The chosen rows as a `datasets.Dataset` with columns `cluster` and `weight`."""
        import datasets

        return datasets.load_from_disk(str(self.folder / "dataset"))

    def training_data(self) -> TrainingData:
        """The chosen rows as tokens, exactly as `clusterft train` would use them. Raises ValueError if the data have changed."""
        from clusterft import stages

        cfg = load_frozen(self.run_dir / "config.yaml")
        ready = stages.prepare(cfg)
        self.selection.check_against(ready.pool)
        return TrainingData(cfg, tuple(stages.selected_rows(ready, self.selection)), ready.tokenizer, self.selection)


def select(
    data: str | Path | Sequence[str | Path],
    model: str | Path,
    *,
    keep: str | float | None = None,
    rows: int | None = None,
    ratio: str | float | None = None,
    selector: str = "cluster",
    clusters: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    template: str | None = None,
    max_length: int | None = None,
    holdout: int | None = None,
    device: str = "cpu",
    strict: bool = False,
    report: bool = False,
    progress: bool = False,
    fields: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
) -> SelectResult:
    """Chooses a subset and writes it to `out` (default: `<data>-<selector>` in the working folder).

    data      one or several files or folders: JSONL, JSON, CSV, Parquet, also .gz and .zst
    model     a name in conf/model, a folder of save_pretrained, a GGUF file or a hub id
    keep, rows, ratio   exactly one, see `composing.Request`
    fields    column names where the layout is not recognised, for example {"prompt": "question", "response": "answer"}
    strict    stop at the first row that cannot be used
    report    write report.html and report.md as well

    Raises UserError, DataError (a ValueError) or StoreError with one sentence that says what to change.
    """
    files = (data,) if isinstance(data, str | Path) else tuple(data)
    request = Request(
        data=tuple(Path(f) for f in files),
        model=str(model),
        selector=selector,
        keep=None if keep is None else str(keep),
        rows=rows,
        ratio=None if ratio is None else str(ratio),
        clusters=clusters,
        seed=seed,
        template=template,
        max_length=max_length,
        holdout=holdout,
        device=device,
        progress=progress,
        fields=tuple((fields or {}).items()),
        settings=tuple(settings),
    )
    return run_request(request, Path(out) if out is not None else None, strict=strict, report=report)


def run_request(request: Request, out: Path | None, *, strict: bool = False, report: bool = False) -> SelectResult:
    """`select` for a request that is already made; `report` adds report.html and report.md."""
    from clusterft import stages
    from clusterft.preflight import preflight

    cfg = compose_request(request)
    folder = (out or default_folder(cfg, request)).absolute()
    cfg.runtime.runs_dir = str(folder / "run")
    done = claimed(folder, cfg)
    if done is not None:
        return done
    with nothing_left_of_a_refusal(folder):
        preflight(cfg)
        ready = stages.prepare(cfg, strict=strict)
        check_rows(cfg, ready)
        ids, clustering = clustered(cfg, ready) if request.selector == "cluster" else ((), None)
        if clustering is not None and cfg.selector.budget == "fraction":
            check_share(cfg.selector.ratio, len(ready.pool), clustering.sizes)
        labels = None if clustering is None else dict(zip(ids, clustering.labels.tolist(), strict=True))
        store = RunStore(folder / "run")
        run_dir = store.begin(cfg)
        with store.lock(run_dir.name):
            selection, seconds = stages.select(cfg, ready, run_dir)
            facts = {"command": command_of(request, folder), "seconds": seconds}
            header = write_folder(folder, cfg, ready, selection, facts, labels)
    result = SelectResult(folder, run_dir, selection, header)
    if report:
        from clusterft.reporting import report_result

        report_result(result, cfg, ready, {})
    return result


@contextmanager
def nothing_left_of_a_refusal(folder: Path) -> Iterator[None]:
    """After an error `folder` goes again unless something was there or was computed: the corrected command may take the same name."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        made = [p for p in folder.rglob("*") if p.is_file()]
        if not existed and all(p.name in ("config.yaml", ".lock") for p in made):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def default_folder(cfg: DictConfig, request: Request) -> Path:
    """`<data>-<selector>` below the working folder."""
    return Path(f"{cfg.data.name}-{request.selector}")


def claimed(folder: Path, cfg: DictConfig) -> SelectResult | None:
    """The finished selection of this very request, or None if the folder is free or holds its unfinished beginning.

    Raises StoreError or UserError if the folder holds anything else: nothing is overwritten.
    """
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder with --out")
    run = folder / "run" / run_id(cfg)
    if any(folder.iterdir()) and not (run / "config.yaml").is_file():
        raise UserError(f"{folder} is not empty and holds no selection of this request; choose another folder with --out")
    if not (folder / HEADER).is_file():
        return None
    header = read_header(folder)
    if header["run_id"] != run.name:
        raise UserError(f"{folder} holds the finished selection {header['run_id']}; choose another folder with --out")
    if header["data"]["files"] != [file_facts(Path(p)) for p in cfg.data.path]:
        raise UserError(f"{folder} was made from other contents of {cfg.data.path[0]}; choose another folder with --out")
    return SelectResult(folder, run, read_selection(run / "selection"), header)


def open_folder(folder: Path) -> SelectResult:
    """A finished selection from disk. Raises StoreError or UserError if there is none."""
    header = read_header(folder)
    run_dir = folder / "run" / header["run_id"]
    return SelectResult(folder, run_dir, read_selection(run_dir / "selection"), header)


def check_unchanged(header: Mapping[str, Any]) -> None:
    """Raises UserError, naming the file, if a data file is gone or has other contents than when the selection was made."""
    for facts in header["data"]["files"]:
        path = Path(facts["path"])
        if not path.is_file():
            raise UserError(f"{path} is gone, and the selection was made from it; put it back, or select again")
        if file_facts(path) != facts:
            raise UserError(f"{path} has changed since the selection was made; put the old file back, or select again")


def check_rows(cfg: DictConfig, ready: Any) -> None:
    """Raises UserError if the budget asks for no row at all or more than there are."""
    n = len(ready.pool)
    if cfg.selector.budget == "rows" and not 1 <= cfg.selector.rows <= n:
        raise UserError(f"{cfg.selector.rows} rows were asked for, but there are {n:,} to choose from; use 1 ... {n}")
    if cfg.selector.budget == "fraction" and floor_product(cfg.selector.ratio, n) < 1:
        raise UserError(f"a share of {cfg.selector.ratio} of {n:,} rows is less than one row; keep a larger share")


def clustered(cfg: DictConfig, ready: Any) -> tuple[list[str], Any]:
    """Ids of the usable rows in id order, and their `cluster.Clustering`: the one that `choose` makes, drawn by the same seed.

    Computes the proxies where they are missing.
    """
    from clusterft import stages
    from clusterft.cluster import usable_rows

    pool: Pool = ready.pool
    stages.cluster_selector(cfg).check(len(pool), None)
    proxies = stages.features(cfg, ready)["gradient_proxy"].rows
    ids, usable, _ = usable_rows(pool, proxies)
    return ids.tolist(), stages.cluster_selector(cfg).cluster(usable, generator(cfg.seed, "choose"))


def check_share(keep: str, n: int, sizes: np.ndarray) -> None:
    """Raises UserError if equal clusters cannot give floor(keep n) rows: the most they can is K n_min."""
    wanted, k, smallest = floor_product(keep, n), len(sizes), int(sizes.min())
    most = k * smallest
    if wanted > most:
        raise UserError(
            f"keep {keep} asks for {wanted:,} of {n:,} rows, but {k} equal clusters give at most K n_min = {k} x {smallest} = "
            f"{most:,}, a share of {reachable_share(most, n)}; keep at most that, use fewer clusters, or say --rows {wanted}, which "
            "fills up evenly from the larger clusters"
        )
    if wanted < k:
        raise UserError(
            f"keep {keep} asks for {wanted} of {n:,} rows, fewer than the {k} clusters; keep more or use fewer clusters"
        )


def reachable_share(most: int, n: int) -> str:
    """A short decimal text with floor(text * n) = most, so that it can be asked for."""
    digits = max(4, len(str(n)))
    return f"{-(-most * 10**digits // n) / 10**digits:.{digits}f}"
