"""Evidence: a scenario must see the event that it is named after."""

from dspark.config.errors import DSparkError


class NotExercisedError(DSparkError):
    """A scenario ran without the event that it is named after, so it proved nothing."""


def require(evidence: bool, event: str) -> None:
    """Refuse to call a scenario passed that did not see its event."""
    if not evidence:
        raise NotExercisedError(f"it did not happen that {event}")
