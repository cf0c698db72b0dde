"""Which stage an update is made in, and what a run that is cut may publish."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from colar.methods.coconut import Coconut, CoconutConfig
from colar.methods.icot import Icot, IcotConfig
from colar.training.callbacks import Epochs
from colar.training.curriculum import Curriculum, UnfinishedCurriculumError
from colar.training.grpo.trainer import GrpoTrainer
from colar.training.trainer import LatentTrainer

COCONUT = Coconut(CoconutConfig(epochs_per_stage=1, n_stages=2))
"""Stages 1, 2 and 3 begin at epochs 0, 1 and 2."""


def test_an_update_belongs_to_the_stage_that_it_begins_in():
    run = Curriculum(COCONUT, steps_per_epoch=10, max_steps=25)
    assert [run.stage(step) for step in (0, 1, 10, 11, 20, 21, 25)] == [1, 1, 1, 2, 2, 3, 3]
    assert [run.ends_with(step) for step in (20, 21, 25)] == [False, True, True]
    assert [run.epoch(step) for step in (0, 1, 2, 11)] == [0, 0, 0.1, 1]
    # A run of fewer epochs ends with the stage that it comes to.
    assert Curriculum(COCONUT, 10, 15).ends_with(12)


def test_a_cut_names_stage_epoch_and_hours():
    run = Curriculum(COCONUT, steps_per_epoch=100, max_steps=400)
    run.require_end(201, hours=12)
    with pytest.raises(UnfinishedCurriculumError) as error:
        run.require_end(109, hours=12)
    wanted = "stopped by training.max_hours 12 at epoch 1.09, in stage 2 of coconut's curriculum. It ends with stage 3"
    assert wanted in str(error.value)
    with pytest.raises(UnfinishedCurriculumError, match=r"stopped at epoch 0\.50, in stage 1"):
        run.require_end(50, hours=None)


def steps_that_forget(run: Curriculum) -> list[int]:
    """The updates before which the optimiser's moments are forgotten."""
    found = []
    for step in range(run.max_steps):
        optimiser = SimpleNamespace(state={"moments": 1})
        Epochs(SimpleNamespace(), run).on_step_begin(
            None, TrainerState(global_step=step), None, optimizer=optimiser
        )
        if not optimiser.state:
            found.append(step + 1)
    return found


def test_moments_are_forgotten_where_a_stage_begins():
    assert steps_that_forget(Curriculum(COCONUT, steps_per_epoch=10, max_steps=25)) == [11, 21]


def test_reinforcement_has_no_curriculum(capsys):
    """It samples as the last stage thinks: any of its weights may be published."""
    icot = Icot(IcotConfig(removed_per_epoch=4, remove_all_at=39))
    assert (LatentTrainer.samples, GrpoTrainer.samples) == (False, True)
    run = Curriculum(icot, 10, 1000, applies=not GrpoTrainer.samples)
    run.warn()
    run.require_end(5, hours=12)
    assert run.ends_with(0)
    assert not steps_that_forget(run)
    assert capsys.readouterr().err == ""
    sft = Curriculum(icot, 10, 50)
    sft.warn()
    assert (
        "training ends in stage 19 of icot's curriculum, which thinks as in stage 39"
        in capsys.readouterr().err
    )
    with pytest.raises(UnfinishedCurriculumError):
        sft.require_end(5, hours=12)
