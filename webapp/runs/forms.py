"""The new-run form, made from RunSpec: fields, labels, help, limits and choices all come from the model."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from django.conf import settings
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trainer_core.rewards import BUILTINS
from trainer_core.spec import RewardSpec, RunSpec
from webapp.rewards.models import RewardFunction
from webapp.runs.checks import BUILTIN_MODELS
from webapp.runs.problems import Problem, from_pydantic

LONG_TEXT = {"notes": 2, "data.options": 3, "data.prompt_suffix": 2}
"""Fields of several lines, and how many."""
HUB_PATTERN = r"^(?!reasoning_gym:)(?!.*\.(jsonl|csv|parquet)$)."
"""Names of datasets that can only be hub ids."""
SHOWN_IF = {
    **{f"lora.{name}": ("lora.enabled", "^on$") for name in ("r", "alpha", "dropout", "target_modules", "push")},
    **{f"data.{name}": ("data.source", "^reasoning_gym:") for name in ("size", "options")},
    **{f"data.{name}": ("data.source", HUB_PATTERN) for name in ("config", "split")},
    **{f"evaluation.{name}": ("evaluation.source", HUB_PATTERN) for name in ("config", "split")},
    "evaluation.rename_columns": ("evaluation.source", "."),
    "training.warmup_steps": ("training.lr_scheduler_type", "^(?!constant$)"),
    "training.num_sampler_logprobs": ("training.score_centering", "^on$"),
    "exporters.project": ("exporters.targets", "wandb|trackio|mlflow"),
    "exporters.mlflow_url": ("exporters.targets", "mlflow"),
}
"""Fields that matter only while another field's text matches a pattern."""
REWARD_LIMIT = 32


@dataclass
class FormField:
    """One control. `kind`: text, number, checkbox, select, textarea."""

    path: str
    label: str
    help: str
    kind: str
    value: Any
    choices: list[str] = field(default_factory=list)
    suggestions: list[str] = field(default_factory=list)
    rows: int = 0
    optional: bool = False
    advanced: bool = False
    shown_by: str = ""
    shown_if: str = ""
    errors: list[str] = field(default_factory=list)


@dataclass
class RewardRow:
    """One line of the rewards chooser."""

    index: int | str
    name: str
    version: str
    weight: str
    errors: list[str] = field(default_factory=list)


@dataclass
class FormSection:
    key: str
    title: str
    help: str
    fields: list[FormField]
    errors: list[str] = field(default_factory=list)

    @property
    def basic(self) -> list[FormField]:
        return [field for field in self.fields if not field.advanced]

    @property
    def folded(self) -> list[FormField]:
        return [field for field in self.fields if field.advanced]

    @property
    def folded_open(self) -> bool:
        """A folded field with an error must be seen."""
        return any(field.errors for field in self.folded)


@dataclass
class SpecForm:
    """Everything the template needs. `general` are problems of no single field."""

    sections: list[FormSection]
    rewards: list[RewardRow]
    reward_errors: list[str]
    general: list[str]


def leaves(model: type[BaseModel] = RunSpec, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted path and declaration of every field that is one control; rewards are drawn apart."""
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}.")
        elif f"{prefix}{name}" != "rewards":
            yield f"{prefix}{name}", info


def parse(post: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """The spec that a posted form means, as a dictionary that is still to be validated, and what could not be read."""
    data: dict[str, Any] = {}
    problems: list[Problem] = []
    for path, info in leaves():
        try:
            section, _, name = path.rpartition(".")
            (data.setdefault(section, {}) if section else data)[name] = _read(path, info, post)
        except yaml.YAMLError as error:
            problems.append(Problem(path, f"Not valid YAML: {' '.join(str(error).split())}."))
    data["rewards"] = [
        {
            "name": post.get(f"rewards.{index}.name", ""),
            "version": post.get(f"rewards.{index}.version", "").strip() or None,
            "weight": post.get(f"rewards.{index}.weight", "").strip(),
        }
        for index in _reward_indexes(post)
    ]
    return data, problems


def validate(post: Mapping[str, str]) -> tuple[RunSpec | None, list[Problem]]:
    """The spec of a posted form, or None and why not."""
    data, problems = parse(post)
    try:
        spec = RunSpec.model_validate(data)
    except ValidationError as error:
        return None, [*problems, *from_pydantic(error)]
    return (None, problems) if problems else (spec, [])


def from_spec(spec: RunSpec, problems: list[Problem] | None = None) -> SpecForm:
    """The form filled with a valid spec."""
    values = dict(flatten(spec.model_dump(mode="json")))
    texts = {path: _text(path, info, values.get(path)) for path, info in leaves()}
    rows = [
        RewardRow(index, reward.name, str(reward.version or ""), _plain(reward.weight))
        for index, reward in enumerate(spec.rewards)
    ]
    return _build(texts, rows, problems or [])


def from_post(post: Mapping[str, str], problems: list[Problem]) -> SpecForm:
    """The form as it was posted, with its problems beside the fields."""
    texts = {path: _posted(info, post.get(path)) for path, info in leaves()}
    rows = [
        RewardRow(
            position,
            name=post.get(f"rewards.{index}.name", ""),
            version=post.get(f"rewards.{index}.version", ""),
            weight=post.get(f"rewards.{index}.weight", ""),
        )
        for position, index in enumerate(_reward_indexes(post))
    ]
    return _build(texts, rows, problems)


def reward_choices() -> dict[str, list[dict[str, Any]]]:
    """Names, descriptions and versions of the rewards that can be chosen: built in, and written here."""
    own = RewardFunction.objects.filter(archived=False).prefetch_related("versions")
    return {
        "Built in": [{"name": name, "help": builtin.description, "versions": []} for name, builtin in BUILTINS.items()],
        "Written here": [
            {
                "name": function.name,
                "help": function.description,
                "versions": [version.number for version in function.versions.all()],
            }
            for function in own
        ],
    }


def _build(texts: dict[str, Any], rows: list[RewardRow], problems: list[Problem]) -> SpecForm:
    by_field: dict[str, list[str]] = {}
    for problem in problems:
        by_field.setdefault(problem.field, []).append(problem.message)
    sections: dict[str, FormSection] = {"": FormSection("", "Run", "", [])}
    for name, info in RunSpec.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            doc = (info.annotation.__doc__ or "").strip()
            sections[name] = FormSection(name, info.title or name, doc, [], by_field.pop(name, []))
    for path, info in leaves():
        key = path.rpartition(".")[0]
        sections[key].fields.append(_control(path, info, texts[path], by_field.pop(path, [])))
    for row in rows:
        for part in ("", ".name", ".version", ".weight"):
            row.errors += by_field.pop(f"rewards.{row.index}{part}", [])
    reward_errors = by_field.pop("rewards", [])
    general = by_field.pop("", []) + [f"{path}: {text}" for path, found in by_field.items() for text in found]
    return SpecForm(list(sections.values()), rows, reward_errors, general)


def _control(path: str, info: FieldInfo, value: Any, errors: list[str]) -> FormField:
    inner, optional = _unwrap(info.annotation)
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    control = FormField(
        path, info.title or path, info.description or "", "text", value, optional=optional, errors=errors,
        advanced=bool(extra.get("advanced")),
    )  # fmt: skip
    control.shown_by, control.shown_if = SHOWN_IF.get(path, ("", ""))
    if inner is bool:
        control.kind = "checkbox"
    elif get_origin(inner) is Literal:
        control.kind, control.choices = "select", list(get_args(inner))
    elif inner in (int, float):
        control.kind = "number"
    elif path in LONG_TEXT:
        control.kind, control.rows = "textarea", LONG_TEXT[path]
    if path == "model.path":
        control.suggestions = _models()
    return control


def _models() -> list[str]:
    folders = sorted(settings.MODELS_DIR.glob("*/config.json")) if settings.MODELS_DIR.is_dir() else []
    return [*BUILTIN_MODELS, *(str(path.parent) for path in folders if path.parent.name not in BUILTIN_MODELS)]


def _unwrap(annotation: Any) -> tuple[Any, bool]:
    """The type itself, and whether None is allowed too."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [argument for argument in get_args(annotation) if argument is not type(None)]
        return inner[0], True
    return annotation, False


def _read(path: str, info: FieldInfo, post: Mapping[str, str]) -> Any:
    inner, optional = _unwrap(info.annotation)
    text = post.get(path, "")
    if inner is bool:
        return path in post
    if get_origin(inner) is dict:
        loaded = yaml.safe_load(text)
        return {} if loaded is None else loaded
    if get_origin(inner) is list:
        return [word.strip() for word in text.split(",") if word.strip()]
    if optional and not text.strip():
        return None
    if inner in (int, float):
        return text.strip()
    # Browsers send line ends as \r\n; a spec holds plain \n.
    return text.replace("\r\n", "\n") if path in LONG_TEXT else text.strip()


def _text(path: str, info: FieldInfo, value: Any) -> Any:
    inner, _ = _unwrap(info.annotation)
    if inner is bool:
        return bool(value)
    if value is None:
        return ""
    if get_origin(inner) is dict:
        # A field of one line holds no line ends.
        style: dict[str, Any] = {} if path in LONG_TEXT else {"default_flow_style": True, "width": float("inf")}
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, **style).rstrip("\n") if value else ""
    if get_origin(inner) is list:
        return ", ".join(value)
    return _plain(value)


def _plain(value: Any) -> str:
    """A number as people write it: 1 instead of 1.0, 1e-06 instead of 0.000001."""
    if isinstance(value, float):
        return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else repr(value)
    return str(value)


def _posted(info: FieldInfo, text: str | None) -> Any:
    inner, _ = _unwrap(info.annotation)
    return text is not None if inner is bool else (text or "")


def _reward_indexes(post: Mapping[str, str]) -> list[int]:
    indexes = {key.split(".")[1] for key in post if key.startswith("rewards.") and key.count(".") == 2}
    return sorted(int(index) for index in indexes if index.isdigit())[:REWARD_LIMIT]


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values, down to the fields of sections; `data.options` stays whole."""
    paths = {path for path, _ in leaves()}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in paths:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def spec_diff(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings in which two specs (as JSON) differ: (path, before, after), in the order of the form."""
    old, new = dict(flatten(before)), dict(flatten(after))
    return [(path, old.get(path), new.get(path)) for path in {**old, **new} if old.get(path) != new.get(path)]


def empty_reward_row(index: int | str) -> RewardRow:
    default = RewardSpec()
    return RewardRow(index, default.name, "", _plain(default.weight))
