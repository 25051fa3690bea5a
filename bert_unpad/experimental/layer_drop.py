"""Progressive layer dropping: deep layers are left out of an update, more often as time goes on.

Zhang and He (2020), "Accelerating Training of Transformer-Based Language Models with Progressive
Layer Dropping" (arXiv:2010.13369). With theta(t) = (1 - theta) exp(-gamma t) + theta, layer i of L,
counted from 0, takes part in update t with probability 1 - (i / L) (1 - theta(t)). A layer that is
left out hands on its input. The paper switches the two halves of pre-LayerNorm layers one by one
and scales what they add; here a whole layer is switched, unscaled.
"""

import math

import numpy as np

from bert_unpad.pretrain.config import GrowthConfig
from bert_unpad.pretrain.growth.stage import Growth, Setting, Stage

_THETA = 0.5  # where the mean keep probability of the top layer goes
_GAMMA = 100  # how fast it goes there, in a whole run

_STREAM = 0x4C41  # keeps this use of (seed, step) apart from others'


def keep_probabilities(layers: int, step: int, theta: float, gamma: float) -> list[float]:
    """The keep probability of each layer, from the bottom, in the update after `step` updates."""
    now = (1.0 - theta) * math.exp(-gamma * step) + theta
    return [1.0 - index / layers * (1.0 - now) for index in range(layers)]


def layer_drop(config: GrowthConfig, setting: Setting) -> Growth:
    """One stage, whose updates each train a random choice of layers.

    The choice depends on the run's seed and the number of updates made, so it is the same on all
    ranks, in all passes of an update, and in a run that is resumed.
    """
    gamma = _GAMMA / setting.total_steps

    def active_layers(step: int) -> tuple[bool, ...]:
        draw = np.random.default_rng([setting.seed, step, _STREAM]).random(setting.layers)
        return tuple((draw < keep_probabilities(setting.layers, step, _THETA, gamma)).tolist())

    stage = Stage(setting.total_steps, setting.layers, setting.max_seq_length)
    return Growth((stage,), active_layers=active_layers)
