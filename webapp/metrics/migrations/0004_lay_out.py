"""Points that were stored by the first layout are laid out anew; none is lost."""

import numpy as np
from django.db import migrations

from webapp.metrics.appending import append, pack_columns, roll_up
from webapp.metrics.layout import POINT


def lay_out(apps, schema_editor):
    series_model, block_model, pack_model = (apps.get_model("metrics", name) for name in ("Series", "Block", "Pack"))
    for series in series_model.objects.iterator(chunk_size=100):
        old = [bytes(data) for data in series.blocks.order_by("number").values_list("old_data", flat=True)]
        points = np.frombuffer(b"".join([*old, bytes(series.tail)]), POINT)
        if not len(points):
            continue
        series.blocks.all().delete()
        series.points, series.first_step, series.blocks_written, series.sealed_max_step = 0, None, 0, None
        series.tail = b""
        appended = append([series], points, points["value"][None])
        block_model.objects.bulk_create([block_model(series=series, old_data=b"", **columns) for columns in appended.blocks[0]], 50)
        packs = [
            pack_model(series=series, **pack_columns(level, number, rows[0]))
            for level, number, rows in roll_up(0, appended.rows, {})
        ]
        pack_model.objects.bulk_create(packs, 50)
        series.save()


def refuse(apps, schema_editor):
    if apps.get_model("metrics", "Series").objects.exists():
        raise RuntimeError("The stored points can't be laid out the old way; keep this version, or start an empty database.")


class Migration(migrations.Migration):
    dependencies = [("metrics", "0003_rollups")]

    operations = [migrations.RunPython(lay_out, refuse)]
