"""The errors that dspark raises for its users: one clear sentence, with the values and the remedy."""


class DSparkError(ValueError):
    """Anything a user can cause and can put right; commands print it and exit with code 2."""


class ConfigError(DSparkError):
    """A setting is nonsense by itself, or is not admitted for this model."""


class CheckpointError(DSparkError):
    """A checkpoint is missing, broken, or not the one that the model needs."""
