"""`Recipe`: everything that a training run is, from one YAML file (a shipped one by its name) and exact dotted
overrides.

    colar train tiny/colar --training.learning_rate 1e-3 --method.alpha 0.05

An unknown key is an error that names the nearest right one; every value is checked before any work starts.

    schema         the sections and keys;  parsing reads and checks them
    examples, start   the rows of a recipe; its method and model
    run            stages, one after another;  ownership keeps two runs out of one folder, check measures a recipe
    train          `colar.train`: facts of a backbone and rows, auto makes a recipe of them, outcome measures its end
"""

from colar.recipe.examples import load_examples
from colar.recipe.ownership import claim_run
from colar.recipe.parsing import Stage, load, load_stages
from colar.recipe.run import run, run_stages
from colar.recipe.schema import DataConfig, ModelConfig, Recipe, SourceRows
from colar.recipe.start import build_method, load_model
from colar.recipe.train import finish, folder_of, prepare_run, train

__all__ = [
    "DataConfig",
    "ModelConfig",
    "Recipe",
    "SourceRows",
    "Stage",
    "build_method",
    "claim_run",
    "finish",
    "folder_of",
    "load",
    "load_examples",
    "load_model",
    "load_stages",
    "prepare_run",
    "run",
    "run_stages",
    "train",
]
