"""Tables and figures: one spec both plans and renders.

    conf/experiment/ID.yaml ─► spec.load_spec ─► spec.expand ─► cells
    cells + resolve + records ─► plan.plan        what is complete, missing, failed, shared; hours still to run
    cells + resolve + records ─► aggregate.build  one line a (row, column), one value a metric, run ids behind each
    table ─► render                               Markdown, CSV, LaTeX, JSON, terminal; the same bytes every time

`resolve(overrides) -> (run_id, config)` is handed in by the composition root, so nothing here needs Hydra; nothing here imports
torch, so that a table is built from records within a second.
"""
