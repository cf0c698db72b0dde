"""`Recipe`: everything that a training run is, from one YAML file (a shipped one by its name) and exact dotted
overrides.

    colar train tiny/colar --training.learning_rate 1e-3 --method.alpha 0.05

An unknown key is an error that names the nearest right one; every value is checked before any work starts.
`schema` has the keys, `parsing` reads and checks them, `rows` loads the data, `run` runs it all, and `ownership` keeps
two runs out of one folder.
"""

from colar.recipe.examples import load_examples
from colar.recipe.ownership import claim
from colar.recipe.parsing import Stage, all_keys, build_method, check_grpo, load, load_stages
from colar.recipe.run import check_start, load_model, make_validate, run, run_stages
from colar.recipe.schema import DataConfig, ModelConfig, Recipe, ValidationConfig, to_json
from colar.recipe.train import finish, folder_of, plan, train

__all__ = [
    "DataConfig",
    "ModelConfig",
    "Recipe",
    "Stage",
    "ValidationConfig",
    "all_keys",
    "build_method",
    "check_grpo",
    "check_start",
    "claim",
    "finish",
    "folder_of",
    "load",
    "load_examples",
    "load_model",
    "load_stages",
    "make_validate",
    "plan",
    "run",
    "run_stages",
    "to_json",
    "train",
]
