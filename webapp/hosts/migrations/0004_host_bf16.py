"""Whether a host's processor multiplies in bfloat16."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("hosts", "0003_use"),
    ]

    operations = [
        migrations.AddField(
            model_name="host",
            name="bf16",
            field=models.BooleanField(help_text="Whether its processor multiplies in bfloat16.", null=True),
        ),
    ]
