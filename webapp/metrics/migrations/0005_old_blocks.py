from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("metrics", "0004_lay_out")]

    operations = [migrations.RemoveField(model_name="block", name="old_data")]
