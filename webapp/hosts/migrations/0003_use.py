"""What hosts and devices last reported of their use."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("hosts", "0002_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="device",
            name="memory_used_mib",
            field=models.PositiveBigIntegerField(null=True),
        ),
        migrations.AddField(
            model_name="device",
            name="power_w",
            field=models.FloatField(null=True),
        ),
        migrations.AddField(
            model_name="device",
            name="temperature_c",
            field=models.FloatField(null=True),
        ),
        migrations.AddField(
            model_name="device",
            name="util",
            field=models.FloatField(help_text="Percent.", null=True),
        ),
        migrations.AddField(
            model_name="host",
            name="disk_free_mib",
            field=models.PositiveBigIntegerField(null=True),
        ),
        migrations.AddField(
            model_name="host",
            name="disk_mib",
            field=models.PositiveBigIntegerField(null=True),
        ),
        migrations.AddField(
            model_name="host",
            name="load",
            field=models.FloatField(help_text="Processes that run or want to, mean of a minute.", null=True),
        ),
        migrations.AddField(
            model_name="host",
            name="memory_free_mib",
            field=models.PositiveBigIntegerField(null=True),
        ),
    ]
