"""`Recipe`: all settings of a training run, from one YAML file (a shipped one by its name) and dotted overrides.

    colar train tiny/colar --training.learning_rate 1e-3 --method.alpha 0.05

An unknown key is an error that names the nearest right one; all that needs neither data nor weights is checked first.

    schema         the sections and keys;  parsing reads a file of them, with overrides
    run            stages, one after another, each in a folder of its own
    example_sets   the rows to train on, and to validate with
    measure        `colar train --check`: the time and memory that a recipe requires on this machine
    auto_run       `colar.train`: makes a recipe for a backbone and rows (facts, auto_recipe), runs it, and
                   measures every speed (auto_speeds, speed_report)
"""

from colar.recipe.example_sets import load_example_sets
from colar.recipe.parsing import load, load_stages
from colar.recipe.run import load_method, load_model, run, run_stages
from colar.recipe.schema import DataConfig, ModelConfig, Recipe, SourceRows, Stage, build_method

__all__ = [
    "DataConfig",
    "ModelConfig",
    "Recipe",
    "SourceRows",
    "Stage",
    "build_method",
    "load",
    "load_example_sets",
    "load_method",
    "load_model",
    "load_stages",
    "run",
    "run_stages",
]
