"""What was measured at a checkpoint's step, and which checkpoint is the best."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("checkpoints", "0003_exports"),
    ]

    operations = [
        migrations.AddField(
            model_name="checkpoint",
            name="best",
            field=models.BooleanField(default=False, help_text="The best evaluation of the run that has a checkpoint."),
        ),
        migrations.AddField(
            model_name="checkpoint",
            name="evaluation",
            field=models.JSONField(
                default=dict, help_text="What was measured at this step, by metric; empty: nothing."
            ),
        ),
    ]
