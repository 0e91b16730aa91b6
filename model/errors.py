"""Why a model or an adapter could not be loaded. Of a model it is told before serving begins.

ModelError
├── ModelNotFound      nothing readable at that path, package or hub id
├── UnsupportedModel   readable, but serving it would compute something else than its authors meant
├── BadConfig          a value of the configuration cannot be, whatever the weights are
├── BadWeights         the files are damaged, incomplete or do not fit the configuration
└── AdapterError       a LoRA adapter that cannot be read, or that this network cannot apply as it was meant
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be served; the message says what is wrong and names the file or the value."""


class ModelNotFound(ModelError):
    """There is no model where it was looked for."""


class UnsupportedModel(ModelError):
    """The model needs something this network does not compute. Refused rather than served wrongly."""


class BadConfig(ModelError):
    """A value of the configuration that no network can be built from; the message names file and key."""


class BadWeights(ModelError):
    """Tensors are missing, unexpected, of the wrong shape, or the file that holds them is corrupt."""


class AdapterError(ModelError):
    """The adapter is refused; the model goes on as it is."""
