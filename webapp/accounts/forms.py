"""Forms of the account pages."""

from __future__ import annotations

from datetime import timedelta

from django import forms

from webapp.accounts.models import Role, User

LIFETIMES = {"30": "30 days", "90": "90 days", "365": "a year", "": "no end"}

SCOPES = {"all": "do all that I may", "read": "only read"}


class TokenForm(forms.Form):
    name = forms.CharField(max_length=80, label="What is it for?")
    days = forms.ChoiceField(choices=list(LIFETIMES.items()), required=False, initial="90", label="Valid for")
    scope = forms.ChoiceField(choices=list(SCOPES.items()), required=False, initial="all", label="May")

    @property
    def lifetime(self) -> timedelta | None:
        days = self.cleaned_data["days"]
        return timedelta(days=int(days)) if days else None


class RoleForm(forms.Form):
    role = forms.ChoiceField(choices=Role.choices)


class PersonForm(forms.ModelForm):
    """A new account; its first password is made by the studio."""

    role = forms.ChoiceField(choices=Role.choices, required=False, initial=Role.RUNNER_AND_AUTHOR)

    class Meta:
        model = User
        fields = ("username",)
        labels = {"username": "Name"}
        help_texts = {"username": ""}

    def clean_role(self) -> Role:
        return Role(self.cleaned_data["role"] or Role.VIEWER)
