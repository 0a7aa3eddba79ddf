"""CPU threads of one operation, chosen by the size of the model."""

import torch

from dspark.config.environment import Environment
from dspark.layers.plans import ModelPlan

# The products of a narrower model are over before a second thread has started, and where other programs use the cores,
# waiting for that thread costs many times the work.
_NARROW_WIDTH = 1024


def use_threads_for(plan: ModelPlan, environment: Environment) -> int:
    """Set torch's threads for a model and return them: one for a narrow model, unless the user chose their number."""
    if plan.hidden_size < _NARROW_WIDTH and not environment.has_thread_count:
        torch.set_num_threads(1)
    return torch.get_num_threads()
