"""`Recipe`: everything that a training run is, from one YAML file (a shipped one by its name) and exact dotted
overrides.

    colar train tiny/colar --training.learning_rate 1e-3 --method.alpha 0.05

An unknown key is an error that names the nearest right one; every value is checked before any work starts.
`schema` has the keys, `parsing` reads them, `rows` loads the data, `wiring` runs it all; `stages` are recipes that
follow one another in one file.
"""

from colar.recipe.parsing import build_method, check_grpo, load, parser
from colar.recipe.rows import load_examples
from colar.recipe.run import check_start, claim, load_model, make_validate, run
from colar.recipe.schema import DataConfig, ModelConfig, Recipe, ValidationConfig, to_json
from colar.recipe.stages import Stage, load_stages, run_stages

__all__ = [
    "DataConfig",
    "ModelConfig",
    "Recipe",
    "Stage",
    "ValidationConfig",
    "build_method",
    "check_grpo",
    "check_start",
    "claim",
    "load",
    "load_examples",
    "load_model",
    "load_stages",
    "make_validate",
    "parser",
    "run",
    "run_stages",
    "to_json",
]
