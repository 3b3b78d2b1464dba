"""Weights as they are published: numpy arrays by the names of transformers' parameters."""

import warnings
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch

from seed_async.adapters import adapter_parameters

NUMPY_DTYPES: Mapping[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # numpy has no bfloat16: its bits travel
}


def loadable_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """What a version holds, by its published name: the adapters of a model that has some, else every parameter."""
    return adapter_parameters(model) or dict(model.named_parameters())


def check_tensors(
    parameters: Mapping[str, torch.Tensor],
    tensors: Mapping[str, np.ndarray],
    also: Collection[torch.dtype] = (),
) -> None:
    """Raise KeyError or ValueError unless every tensor fits its parameter; tied parameters appear once.

    A tensor has the dtype of its parameter, or one of `also`.
    """
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        raise KeyError(f"missing tensors {missing[:5]}, unknown tensors {unknown[:5]}")
    for name, parameter in parameters.items():
        shape, tensor = tuple(parameter.shape), tensors[name]
        dtypes = [np.dtype(NUMPY_DTYPES[dtype]) for dtype in (parameter.dtype, *also)]
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise ValueError(f"{name} is {tensor.dtype}{list(tensor.shape)}, not {dtypes[0]}{list(shape)}")


def as_torch(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors without a copy; they are for reading only."""
    for name, array in tensors.items():
        with warnings.catch_warnings():
            # The arrays may be read-only views of a message; torch has no such tensors and says so.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(array)
        yield name, tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
