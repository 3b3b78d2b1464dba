"""Torch engines whose loading of weights is broken, each in its own way; they score and sample as they are."""

from collections.abc import Mapping

import numpy as np
import torch

from seed_async.actors.engines.torch_engine import TorchEngine

TENSOR = "model.layers.0.mlp.up_proj.weight"


class ForgetsATensor(TorchEngine):
    """Leaves one tensor as it was, in the next `faults` loads."""

    faults = 0

    def load_weights(self, version: int, tensors: Mapping[str, np.ndarray], *, rollback: bool = False) -> None:
        """Load all the others."""
        if self.faults > 0:
            self.faults -= 1
            old = dict(self._model.named_parameters())[TENSOR].detach().numpy().copy()
            tensors = {**tensors, TENSOR: old}
        super().load_weights(version, tensors, rollback=rollback)


class RuinsATensor(TorchEngine):
    """Once `ruined`, each load ends with one tensor upside down."""

    ruined = False

    def load_weights(self, version: int, tensors: Mapping[str, np.ndarray], *, rollback: bool = False) -> None:
        """Load, and turn it."""
        super().load_weights(version, tensors, rollback=rollback)
        if self.ruined:
            parameter = dict(self._model.named_parameters())[TENSOR]
            with torch.no_grad():
                parameter.copy_(parameter.flip(0))
