"""Every error that the kit raises on purpose: a `RlooKitError` and the standard exception that fits.

A message states what was found, the limit, and the key or command that fixes it.
"""


class RlooKitError(Exception):
    """Root of the kit's own errors."""


class ConfigError(RlooKitError, ValueError):
    """A configuration file, an override or an argument cannot be used as it stands."""


class ImportOrderError(RlooKitError, ImportError):
    """A library was imported before the one that has to patch it (Unsloth before TRL, Transformers and PEFT)."""


class SetupError(RlooKitError, RuntimeError):
    """The machine or the installation cannot do what was asked of it."""


class BackendError(RlooKitError, RuntimeError):
    """A model could not be loaded, saved or continued by the backend that was chosen."""


class RolloutServerError(RlooKitError, ConnectionError):
    """A server of rollouts cannot be reached, or cannot do what the run asks of it."""


class TokenizerError(RlooKitError, ValueError):
    """A tokenizer disagrees with the ids that the rewards and the rollout rely on."""


class DataError(RlooKitError, ValueError):
    """A data source has a row, a column or a file that cannot be used."""


class RewardError(RlooKitError, RuntimeError):
    """Reward functions failed too often to go on, or a reward cannot be built."""


class WholeBatchError(RewardError):
    """A reward failed on the whole batch (a hang, a dead process): scoring sample by sample would not help."""


class RunExistsError(RlooKitError, FileExistsError):
    """A run's folder holds a run already."""


class RunNotFoundError(RlooKitError, FileNotFoundError):
    """A run's folder, or something in it that was asked for, is not there."""


class NoSignalError(RlooKitError, RuntimeError):
    """Training was stopped because its steps carried no learning signal."""


class NonFiniteError(RlooKitError, FloatingPointError):
    """Training was stopped because NaN or infinity came up in too many steps in a row."""
