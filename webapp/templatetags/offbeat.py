"""Template filters used across pages."""

from django import template

register = template.Library()
