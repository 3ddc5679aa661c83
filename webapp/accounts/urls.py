"""Pages of a person's own account. Signing in and out is in webapp/urls.py."""

from django.urls import path

from webapp.accounts import people, views

app_name = "accounts"
urlpatterns = [
    path("", views.account, name="account"),
    path("password/", views.password, name="password"),
    path("people/", people.people, name="people"),
    path("people/<int:user_id>/", people.change, name="change_person"),
    path("tokens/", views.create_token, name="create_token"),
    path("tokens/<int:token_id>/revoke/", views.revoke_token, name="revoke_token"),
]
