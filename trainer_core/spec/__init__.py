"""RunSpec: what a run is. The new-run form, the API, YAML files and the trainer all read this one model.

Field titles and descriptions are the form's labels and help texts; the order of the fields is the order there.
`json_schema_extra=ADVANCED` folds a field away. A section has its class in the module of its topic, and RunSpec in `run`
puts them together. Light on purpose: pydantic and PyYAML only, so that the web app can import it.
"""

from trainer_core.spec.exporters import EXPORTERS, ExporterSpec
from trainer_core.spec.inputs import DataSpec, ModelSpec, RewardSpec
from trainer_core.spec.outcome import CheckpointSpec, EvaluationSpec
from trainer_core.spec.rollouts import AgentSpec, RolloutSpec
from trainer_core.spec.run import SECRET_NAME, SECRET_NAME_ALLOWED, RunSpec
from trainer_core.spec.section import ADVANCED, Dtype, Section
from trainer_core.spec.serving import ResourceSpec, ServerSpec
from trainer_core.spec.training import LORA_RANKS, AttentionBackend, LoraSpec, LossType, TrainingSpec

__all__ = [
    "ADVANCED",
    "EXPORTERS",
    "LORA_RANKS",
    "SECRET_NAME",
    "SECRET_NAME_ALLOWED",
    "AgentSpec",
    "AttentionBackend",
    "CheckpointSpec",
    "DataSpec",
    "Dtype",
    "EvaluationSpec",
    "ExporterSpec",
    "LoraSpec",
    "LossType",
    "ModelSpec",
    "ResourceSpec",
    "RewardSpec",
    "RolloutSpec",
    "RunSpec",
    "Section",
    "ServerSpec",
    "TrainingSpec",
]
