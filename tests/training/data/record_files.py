"""Record files as the public project writes them, made by writers that are not ours."""

import numpy as np
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tfrecord.writer import TFRecordWriter

FLOAT, BFLOAT16 = 1, 14


def serialized(array: np.ndarray, dtype: int = FLOAT, *, packed: bool = False) -> bytes:
    """A tensor as tensorflow's `serialize_tensor` writes it, or with its values as a list."""
    dims = [TensorShapeProto.Dim(size=size) for size in array.shape]
    shape = TensorShapeProto(dim=dims)
    if packed:
        held = TensorProto(dtype=dtype, tensor_shape=shape, float_val=array.ravel())
    else:
        held = TensorProto(dtype=dtype, tensor_shape=shape, tensor_content=array.tobytes())
    return held.SerializeToString()


def clip(seed, size=(16, 3, 4, 6), rows=8, width=5, used=4):
    rng = np.random.default_rng(seed)
    text = np.zeros((rows, width), np.float32)
    text[:used] = rng.standard_normal((used, width))
    return rng.standard_normal(size).astype(np.float32), text


def write(path, clips, **more):
    writer = TFRecordWriter(str(path))
    for number, (latents, text) in enumerate(clips):
        writer.write(
            {
                "latents": (serialized(latents, **more), "byte"),
                "encoder_hidden_states": (serialized(text), "byte"),
                "timesteps": (125 * number, "int"),
            }
        )
    writer.close()
    return path
