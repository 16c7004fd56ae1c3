"""The exceptions that a user can meet.

Each message says what was found, what is supported, and what to do next. The command line prints
the message alone and exits with 2; a traceback means a fault of ours.
"""

from __future__ import annotations


class MLAConvertError(Exception):
    """Base of every error that the input or the call is to blame for."""


class UnsupportedModelError(MLAConvertError):
    """The model or config is not one whose attention this package knows."""


class CheckpointError(MLAConvertError):
    """A checkpoint on disk is incomplete, inconsistent or damaged."""


class FormatError(CheckpointError):
    """A tensor is stored in a form that cannot be read, or its scales do not fit it."""


class SidecarError(MLAConvertError):
    """Absorbed weights on disk are incomplete, of another version, or damaged."""


class OutputError(SidecarError):
    """Writing failed for a reason outside: a full disk, rights, a process that ended."""


class MismatchError(SidecarError):
    """Absorbed weights do not belong to the model or checkpoint they are used with."""


class PatchError(MLAConvertError):
    """A model cannot be patched, or is not in the state that the call needs."""


class StaleWeightsError(PatchError):
    """A patched model's source weights changed in a way that cannot be followed."""


class UsageError(MLAConvertError):
    """Arguments that do not make sense together."""


class ArgumentError(UsageError, ValueError):
    """An argument of a method of transformers', which has a ValueError for it: whoever catches that one still does."""
