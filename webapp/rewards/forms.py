"""Forms for writing and trying reward functions."""

from __future__ import annotations

from typing import Any

from django import forms
from django.db.models import Exists, OuterRef
from django.utils.functional import cached_property

from webapp.rollouts.models import StoredRollout
from webapp.runs.models import Run

RUNS_SHOWN = 50
MAX_GROUPS = 64
"""Stored groups that one test may score."""

STARTER = '''import re


def my_reward(prompts, completions, answer, **columns):
    """1 where the last number of the reply is the answer, 0.1 for any number.

    Called once for each group, with lists that have one entry for each
    completion: `prompts` and `completions` hold chat messages, and every other
    column of the dataset comes by its name (here: `answer`). Returns one
    number for each completion, or None where it can't be scored.
    """
    rewards = []
    for completion, expected in zip(completions, answer):
        text = completion[-1]["content"]
        numbers = re.findall(r"-?\\d+(?:\\.\\d+)?", text)
        if numbers and float(numbers[-1]) == float(expected):
            rewards.append(1.0)
        else:
            rewards.append(0.1 if numbers else 0.0)
    return rewards
'''


def _source() -> forms.CharField:
    widget = forms.Textarea(
        attrs={"class": "code", "spellcheck": "false", "rows": 22, "data-editor": "", "wrap": "off"}
    )
    return forms.CharField(widget=widget, strip=False, label="Python source")


class _SourceForm(forms.Form):
    source = _source()

    def clean_source(self) -> str:
        return self.cleaned_data["source"].replace("\r\n", "\n")


class FunctionForm(_SourceForm):
    """A new function. Its name is that of the Python function."""

    description = forms.CharField(
        max_length=500,
        required=False,
        label="What does it reward?",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )


class VersionForm(_SourceForm):
    """A further version."""

    note = forms.CharField(
        max_length=200, required=False, label="What changed?", widget=forms.TextInput(attrs={"autocomplete": "off"})
    )


class TryForm(forms.Form):
    """What to try a function on."""

    on = forms.ChoiceField(choices=[("pasted", "An example"), ("stored", "Rollouts of a run")], initial="pasted")
    prompt = forms.CharField(required=False, initial="What is 3 * 4?")
    completions = forms.CharField(
        required=False, initial="3 * 4 equals 12.\n---\nThe result is 11.\n---\nI do not know."
    )
    columns = forms.CharField(required=False, initial="answer: 12")
    run = forms.ModelChoiceField(Run.objects.none(), required=False)
    step = forms.IntegerField(required=False, label="Step")
    groups = forms.IntegerField(required=False, min_value=1, max_value=MAX_GROUPS, label="Groups")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["run"]
        assert isinstance(field, forms.ModelChoiceField)
        stored = StoredRollout.objects.filter(run=OuterRef("pk"))
        field.queryset = Run.objects.filter(Exists(stored)).order_by("-created_at")

    @cached_property
    def recent_runs(self) -> list[Run]:
        """Runs with rollouts to choose from."""
        field = self.fields["run"]
        assert isinstance(field, forms.ModelChoiceField)
        return list(field.queryset.only("name")[:RUNS_SHOWN]) if field.queryset is not None else []
