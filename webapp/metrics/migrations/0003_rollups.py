"""Blocks become smaller and get rollups beside them: places for both. The next migration moves the points."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("metrics", "0002_blocks")]

    operations = [
        migrations.CreateModel(
            name="Pack",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("level", models.PositiveSmallIntegerField()),
                ("number", models.PositiveIntegerField()),
                ("first_step", models.BigIntegerField()),
                ("last_step", models.BigIntegerField()),
                ("full", models.BooleanField()),
                ("data", models.BinaryField(help_text="layout.STORED_ROW records.")),
                ("series", models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name="packs", to="metrics.series")),
            ],
        ),
        migrations.AddConstraint(
            model_name="pack",
            constraint=models.UniqueConstraint(fields=("series", "level", "number"), name="one_pack_per_number"),
        ),
        migrations.AddIndex(
            model_name="pack",
            index=models.Index(condition=models.Q(("full", False)), fields=["series"], name="open_packs"),
        ),
        migrations.AddField(
            model_name="series",
            name="late_points",
            field=models.PositiveBigIntegerField(default=0, help_text="Points in blocks that were late: see Block."),
        ),
        migrations.AlterField(
            model_name="series",
            name="tail",
            field=models.BinaryField(default=b"", help_text="Points not yet in a block, as layout.encode makes them."),
        ),
        *(
            migrations.RemoveField(model_name="block", name=name)
            for name in ("last_time", "count", "finite", "kinds", "low", "high", "total", "ordered")
        ),
        migrations.AddField(model_name="block", name="after_step", field=models.BigIntegerField(null=True)),
        migrations.AddField(model_name="block", name="late", field=models.PositiveIntegerField(default=0), preserve_default=False),
        migrations.AddField(
            model_name="block",
            name="rollup",
            field=models.BinaryField(default=b"", help_text="A layout.STORED_ROW for each layout.FAN steps that are not late."),
            preserve_default=False,
        ),
        migrations.RenameField(model_name="block", old_name="data", new_name="old_data"),
        migrations.AddField(  # behind the rollup, which is read without it
            model_name="block", name="data", field=models.BinaryField(default=b""), preserve_default=False
        ),
        migrations.AddIndex(
            model_name="block",
            index=models.Index(condition=models.Q(("late__gt", 0)), fields=["series", "number"], name="blocks_with_late_points"),
        ),
    ]
