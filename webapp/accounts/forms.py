"""Forms of the account pages."""

from __future__ import annotations

from datetime import timedelta

from django import forms

from webapp.accounts.models import User

LIFETIMES = {"30": "30 days", "90": "90 days", "365": "a year", "": "no end"}


class TokenForm(forms.Form):
    name = forms.CharField(max_length=80, label="What is it for?")
    days = forms.ChoiceField(choices=list(LIFETIMES.items()), required=False, initial="90", label="Valid for")

    @property
    def lifetime(self) -> timedelta | None:
        days = self.cleaned_data["days"]
        return timedelta(days=int(days)) if days else None


class PersonForm(forms.ModelForm):
    """A new account; its first password is made by the studio."""

    class Meta:
        model = User
        fields = ("username", "is_superuser")
        labels = {"username": "Name", "is_superuser": "Admin: may steer all runs, drain hosts and add people"}
        help_texts = {"username": "", "is_superuser": ""}
