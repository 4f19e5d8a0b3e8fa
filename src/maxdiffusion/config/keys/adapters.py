"""Keys about LoRA and quantization."""

from maxdiffusion.config.kinds import Boolean, Choice, Integer, Text
from maxdiffusion.config.schema import Frozen, Table, refused, unused

FULL_PRECISION = "Leave it at its default; weights_dtype: bfloat16 is the smallest format"

KEYS = (
    refused(
        "enable_lora",
        Boolean(),
        False,
        "Merge LoRA weights after loading.",
        way_out="Merge them into a diffusers folder first and give that folder",
    ),
    unused("lora_config", Table(), Frozen(), "Which LoRA weights, and how strongly."),
    refused(
        "quantization",
        Choice(("", "int8", "fp8", "fp8_full")),
        "",
        "Format of quantized weights; empty = none.",
        way_out=FULL_PRECISION,
    ),
    refused(
        "use_qwix_quantization",
        Boolean(),
        False,
        "Quantize transformers with qwix.",
        way_out=FULL_PRECISION,
    ),
    unused(
        "quantization_local_shard_count",
        Integer(minimum=1, special=(-1,)),
        -1,
        "Shards of a quantizer's range finding.",
    ),
    unused("qwix_module_path", Text(), ".*", "Which modules qwix quantizes."),
    unused("quantization_calibration_method", Text(), "absmax", "How qwix calibrates."),
    unused("weight_quantization_calibration_method", Text(), "absmax", "The same, weights."),
    unused("act_quantization_calibration_method", Text(), "absmax", "The same, activations."),
    unused("bwd_quantization_calibration_method", Text(), "absmax", "The same, gradients."),
)
