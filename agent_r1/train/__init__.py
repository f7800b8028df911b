"""The loops: reinforcement learning, supervised fine-tuning, evaluation.

Calling this package trains: `agent_r1.train(...)` is the function of the Python API, and a package of the same name
would hide it.
"""

import sys
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("agent_r1.api.training").train(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        return signature(import_module("agent_r1.api.training").train)


sys.modules[__name__].__class__ = _Callable
