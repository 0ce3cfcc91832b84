"""The recorded sites as columns, the stats of each kind, scalars, and the tree of modules."""

from __future__ import annotations

from typing import Any

from sonde.run import Run
from sonde.schema.losses import shown_scalars
from sonde.schema.thinning import scale_of
from sonde.show.web.query import Query
from sonde.show.web.structure import Structure, module_tree, stat_dict, stats_of, structure_of
from sonde.show.web.wire import Reply, json_reply

HEALTH = {"name": "score", "meaning": "Health of each layer, 0 to 100.", "scale": "linear", "needs_hist": False}


def sites(run: Run, query: Query) -> Reply:
    query.only()
    structure = structure_of(run)
    kinds = structure.kinds()
    stats: dict[str, Any] = {kind: [stat_dict(name, scale_of(name)) for name in stats_of(kind)] for kind in kinds}
    names = run.catalog.scalar_names
    shown = set(shown_scalars(names.values()))
    return json_reply(
        {
            "last_step": run.last_step,
            **_columns(structure, kinds),
            "kinds": kinds,
            "stats": {**stats, "health": [HEALTH]},
            "scalars": [{"i": i, "name": name, "is_inspection": name not in shown} for i, name in names.items()],
            "modules": module_tree(structure),
        }
    )


def _columns(structure: Structure, kinds: list[str]) -> dict[str, Any]:
    """Sites as columns instead of objects: a tenth of the bytes, and 10,000 sites parse in a few milliseconds."""
    ids = [number for kind in kinds for number in structure.rows(kind)]
    own = [structure.sites[number] for number in ids]
    dtypes = list(dict.fromkeys(site.dtype for site in own))
    types = list(dict.fromkeys(site.module_type for site in own))
    at_kind, at_dtype, at_type = ({word: n for n, word in enumerate(words)} for words in (kinds, dtypes, types))
    columns = {
        "i": ids,
        "kind": [at_kind[site.kind] for site in own],
        "name": [site.name for site in own],
        "shape": [list(site.shape) for site in own],
        "dtype": [at_dtype[site.dtype] for site in own],
        "owner": [site.owner for site in own],
        "module_type": [at_type[site.module_type] for site in own],
        "order": [structure.depths[number] for number in ids],
        "aliases": {str(n): list(site.aliases) for n, site in zip(ids, own, strict=True) if site.aliases},
    }
    return {"columns": columns, "dtypes": dtypes, "types": types}
