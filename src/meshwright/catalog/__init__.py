"""Models, accelerators, fabrics, clusters, claims, prices, run files: what Meshwright knows, with sources.

Every value has its source beside it in `data/`; `lookup.entry` returns both. `lookup` has the functions of this room.
The listings of the Python API (`meshwright.catalog.models()`) show numbers of the cost model: `meshwright.api.catalog`.
"""
