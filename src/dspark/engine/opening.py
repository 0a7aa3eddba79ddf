"""What is settled before any weight is read: which files, which plan, and whether the configuration is admitted."""

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from dspark.checkpoint.folder import release_fingerprint
from dspark.config import Admission, Config, ModelFacts
from dspark.engine.device import engine_facts, hardware_facts
from dspark.layers.plans import ModelPlan
from dspark.models.build import read_config
from dspark.models.facts import has_vision, model_facts
from dspark.models.registry import parse_config


@dataclass(frozen=True)
class Opening:
    """An admitted configuration over a checkpoint.

    Attributes:
        config: without a speculative_config where nobody asked for one and the checkpoint has no drafter.
        folder: of the target.
        draft_folder: of the drafter, where it is another one of the same release; None otherwise.
        plan, facts: of the target.
        admission: notes and remarks; there are no refusals.
    """

    config: Config
    folder: Path
    draft_folder: Path | None
    plan: ModelPlan
    facts: ModelFacts
    admission: Admission


def open_checkpoint(config: Config, *, is_draft_optional: bool) -> Opening:
    """Read metadata and apply the rules of admission.

    Args:
        config: all settings.
        is_draft_optional: decode plainly where the checkpoint has no drafter, instead of refusing.
    Raises:
        ConfigError: the configuration is not admitted, or config.json describes no known model.
        CheckpointError: there is no readable config.json.
    """
    folder = Path(config.model) if config.model else embedded_folder()
    plan, facts = _read(folder)
    if is_draft_optional and plan.draft is None:
        config = replace(config, speculative_config=None)
    draft_folder = _other_draft_folder(config, folder)
    draft = _read(draft_folder)[1] if draft_folder else None
    admission = config.validated(facts, draft=draft, hardware=hardware_facts(), engine=engine_facts())
    return Opening(config, folder, draft_folder, plan, facts, admission)


def embedded_folder() -> Path:
    """Folder of the model that ships with the package."""
    return Path(str(files("dspark"))) / "assets" / "embedded"


def _read(folder: Path) -> tuple[ModelPlan, ModelFacts]:
    settings = read_config(folder)
    plan = parse_config(settings)
    facts = model_facts(plan, fingerprint=release_fingerprint(folder), has_vision=has_vision(settings))
    return plan, facts


def _other_draft_folder(config: Config, folder: Path) -> Path | None:
    """The drafter's folder when it is not the target's own, by whatever path it is named."""
    if config.speculative_config is None or config.speculative_config.model is None:
        return None
    named = Path(config.speculative_config.model)
    return None if named.resolve() == folder.resolve() else named
