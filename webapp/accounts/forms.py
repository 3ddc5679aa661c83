"""Forms of the account pages."""

from __future__ import annotations

from datetime import timedelta

from django import forms

LIFETIMES = {"30": "30 days", "90": "90 days", "365": "a year", "": "no end"}


class TokenForm(forms.Form):
    name = forms.CharField(max_length=80, label="What is it for?")
    days = forms.ChoiceField(choices=list(LIFETIMES.items()), required=False, initial="90", label="Valid for")

    @property
    def lifetime(self) -> timedelta | None:
        days = self.cleaned_data["days"]
        return timedelta(days=int(days)) if days else None
