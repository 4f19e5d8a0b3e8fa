"""Record files of an independent writer are read exactly; damage is named."""

import gzip
import struct

import numpy as np
import pytest
from tfrecord.writer import TFRecordWriter

from maxdiffusion.runtime.files import as_path
from maxdiffusion.training.data.tfrecord import BadRecord, list_records, masked_crc, read_clip
from tests import object_storage
from tests.training.data.record_files import BFLOAT16, clip, serialized, write


@pytest.mark.parametrize("packed", [False, True])
def test_clips_are_read_as_they_were_written(tmp_path, packed):
    clips = [clip(0), clip(1, size=(16, 1, 2, 2), used=8), clip(2)]
    path = write(tmp_path / "file_00-3.tfrec", clips, packed=packed)
    records = list(list_records(path))
    assert [record.latents for record in records] == [latents.shape for latents, _ in clips]
    assert [record.text for record in records] == [(8, 5)] * 3
    assert [record.full for record in records] == [False, True, False]
    for record, (latents, text) in zip(records, clips, strict=True):
        found = read_clip(path, record)
        np.testing.assert_array_equal(found["latents"], np.moveaxis(latents, 0, -1))
        np.testing.assert_array_equal(found["encoder_hidden_states"], text)


def test_bfloat16_is_read(tmp_path):
    latents, text = clip(0)
    bits = (latents.view(np.uint32) >> 16).astype(np.uint16)  # truncated to 16 bits
    path = write(tmp_path / "a.tfrec", [(bits, text)], dtype=BFLOAT16)
    (record,) = list_records(path)
    expected = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(read_clip(path, record)["latents"], np.moveaxis(expected, 0, -1))


def test_files_in_object_storage_are_read_by_ranges(tmp_path, monkeypatch):
    monkeypatch.setenv(object_storage.ROOT, str(tmp_path))
    object_storage.use_buckets()
    (tmp_path / "bucket").mkdir()
    write(tmp_path / "bucket" / "a.tfrec", [clip(0), clip(1)])
    path = as_path("gs://bucket/a.tfrec")
    *_, last = list_records(path)
    expected = np.moveaxis(clip(1)[0], 0, -1)
    np.testing.assert_array_equal(read_clip(path, last)["latents"], expected)


def test_damage_is_named(tmp_path):
    path = write(tmp_path / "a.tfrec", [clip(0), clip(1)])
    first, second = list_records(path)
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-9])
    with pytest.raises(BadRecord, match=f"a.tfrec: record at byte {second.start - 12}: the file e"):
        list(list_records(path))
    content[first.start + 300] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadRecord, match=r"a\.tfrec: record at byte 0 has another checksum"):
        read_clip(path, first)
    path.write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(BadRecord, match="its length has another checksum"):
        list(list_records(path))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"image": (b"x", "byte")}, "it has no latents and no encoder_hidden_states, but image"),
        (
            {
                "latents": (serialized(np.zeros((2, 2), np.float32)), "byte"),
                "encoder_hidden_states": (serialized(np.zeros((2, 2), np.float32)), "byte"),
            },
            r"latents has the shape \(2, 2\): must have 4 dimensions",
        ),
        (
            {
                "latents": (serialized(np.zeros((1, 1, 1, 1), np.int32), dtype=3), "byte"),
                "encoder_hidden_states": (serialized(np.zeros((2, 2), np.float32)), "byte"),
            },
            "a tensor has the type 3",
        ),
    ],
)
def test_other_records_are_refused(tmp_path, features, message):
    writer = TFRecordWriter(str(tmp_path / "a.tfrec"))
    writer.write(features)
    writer.close()
    with pytest.raises(BadRecord, match=message):
        list(list_records(tmp_path / "a.tfrec"))


def test_the_checksum_is_that_of_the_format():
    # Eight zero bytes, the length of an empty record: known from every tfrecord writer.
    from tensorboardX.record_writer import masked_crc32c

    for content in (struct.pack("<Q", 0), b"123456789", bytes(range(256))):
        assert masked_crc(content) == masked_crc32c(content)
