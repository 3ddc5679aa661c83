from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("runs", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="run",
            name="forked_step",
            field=models.PositiveBigIntegerField(
                help_text="Step of the parent's checkpoint whose weights this run begins with.", null=True
            ),
        ),
    ]
