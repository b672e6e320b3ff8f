"""Meshwright plans, trains and measures large language models on any GPU cluster.

    describe -> plan -> rehearse -> train -> measure -> report -> better plans

The thinking half (everything that is imported by `plan`, `estimate`, `scale`, `accuracy`, `catalog`)
is pure Python and NumPy. Start reading at `meshwright.specs` (what things are), then
`meshwright.cost.step` (how long a step takes), then `meshwright.planner` (which plan is best).
"""

__version__ = "0.1.0"
