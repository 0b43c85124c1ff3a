"""What must hold for vectors that are used again: nobody else writes to one that is held."""

import gc

import pytest
import torch

from lowcomm_node.trainer.scratch import Scratch


def test_a_vector_comes_back_once_nobody_holds_it_or_a_view_of_it():
    scratch = Scratch(1000, most_free=4)
    first = scratch.take(1000)
    place, view = first.data_ptr(), first[3:5].numpy()
    del first
    assert scratch.take(1000).data_ptr() != place
    again = torch.from_numpy(view)
    del view
    assert scratch.take(10).data_ptr() != place
    del again
    assert scratch.take(10).data_ptr() == place and scratch.made == 2


def test_two_that_are_held_share_nothing_and_what_is_kept_free_is_bounded():
    scratch = Scratch(1000, most_free=2)
    held = [scratch.take(900) for _ in range(5)]
    assert len({one.data_ptr() for one in held}) == scratch.made == 5
    held.clear()
    gc.collect()
    held = [scratch.take(900) for _ in range(5)]
    assert scratch.made == 5 + 3


@pytest.mark.parametrize("numel", [0, 1, 1000, 1001])
def test_what_is_lent_is_as_long_as_was_asked(numel: int):
    vector = Scratch(1000, most_free=1).take(numel)
    assert vector.shape == (numel,) and vector.dtype == torch.float32
